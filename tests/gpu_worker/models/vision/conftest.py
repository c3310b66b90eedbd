"""Engines over small models that see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Engine, EngineConfig
from tests.support.seeing import write_seeing

Folders = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """folders(name) -> (folder, the model of transformers), written once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, write_seeing(folder, name)
        return made[name]

    return get


@pytest.fixture
def open_engine(folders: Folders, cpu_path: str) -> Iterator[Callable[..., tuple[Engine, Any]]]:
    """open_engine(name, **settings) -> (the engine, the model of transformers)."""
    opened: list[Engine] = []

    def get(name: str = "qwen3-vl", **settings: Any) -> tuple[Engine, Any]:
        folder, model = folders(name)
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
        engine = Engine(EngineConfig(model=str(folder), **defaults | settings))
        opened.append(engine)
        return engine.start(), model

    yield get
    for engine in opened:
        engine.shutdown()
