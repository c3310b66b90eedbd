"""Tests of the CUDA path against transformers on the CPU. `python -m pytest tests/gpu` on a CUDA machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and item.path.name != "test_fused.py":
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """checkpoint(family) -> (folder, the model of transformers). In bf16, with the head size 64."""
    from families import build_model

    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = build_model(name, head_dim=64).to(torch.bfloat16)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = (folder, model.float())
        return made[name]

    return get


@pytest.fixture
def open_runtime() -> Iterator[Callable[..., Any]]:
    from gpu_worker.config import EngineConfig
    from gpu_worker.runtime.runtime import ModelRuntime

    opened: list[ModelRuntime] = []

    def get(folder: Path, **settings: Any) -> ModelRuntime:
        defaults: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "max_num_seqs": 8,
            "num_pages": 4096,
            "graph_batch_sizes": (1, 4, 8),
        }
        runtime = ModelRuntime(EngineConfig(model=str(folder), **defaults | settings))
        opened.append(runtime)
        return runtime

    yield get
    for runtime in opened:
        runtime.close()
    torch.cuda.empty_cache()
