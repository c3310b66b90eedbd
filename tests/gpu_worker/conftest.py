"""Small random checkpoints of every family, written by transformers, and runtimes over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from tests.support.families import build_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """checkpoint(family) -> (folder, the model of transformers), written once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = build_model(name)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = (folder, model)
        return made[name]

    return get


@pytest.fixture(params=["native", "torch"])
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a CPU computes; the compiled one only where there is a compiler."""
    if request.param == "native" and load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on" if request.param == "native" else "off")
    return str(request.param)


@pytest.fixture
def open_runtime(cpu_path: str) -> Iterator[Callable[..., ModelRuntime]]:
    """open_runtime(folder, **engine settings) -> a runtime on the CPU, closed after the test."""
    opened: list[ModelRuntime] = []

    def get(folder: Path | str, **settings: Any) -> ModelRuntime:
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8}
        runtime = ModelRuntime(EngineConfig(model=str(folder), **defaults | settings))
        opened.append(runtime)
        return runtime

    yield get
    for runtime in opened:
        runtime.close()
