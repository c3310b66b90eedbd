"""Tests of the CUDA path against transformers on the CPU. `python -m pytest tests/gpu` on a CUDA machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))


NAMES = ("coded", "compiled", "fla", "fused", "grouped", "split_k", "split")
WITHOUT_A_CARD = {f"test_{name}.py" for name in NAMES}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and item.path.name not in WITHOUT_A_CARD:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """At once: a run that is stopped while the device hangs comes to no summary."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


@pytest.fixture(autouse=True)
def device_after_test() -> Iterator[None]:
    """What the device did wrong ends the run with the test that made it do so: nothing works in this process
    afterwards. `CUDA_LAUNCH_BLOCKING=1` then names the launch."""
    yield
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"the device failed: {error}", returncode=1)


WIDER: dict[str, dict[str, Any]] = {
    name: {"global_head_dim": 128}
    for name in ("gemma4", "gemma4-experts", "gemma4-per-layer", "gemma4-values-from-keys")
}
"""Changes of families with a second head size."""

FACTORS = ("short_factor", "long_factor")
"""Which have a number for each frequency of a head: four times as many as heads of 16 have."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """checkpoint(family, **changes) -> (folder, the model of transformers). In bf16; the head size is 64 unless
    `changes`, which override the shape, say otherwise."""
    from tests.support.families import LONGROPE, build_model

    longer = {"rope_parameters": LONGROPE | {f: 4 * LONGROPE[f] for f in FACTORS}}
    wider = WIDER | {"phi4-mini": longer | {"hidden_size": 256}}  # transformers divides it by the heads

    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str, **changes: Any) -> tuple[Path, Any]:
        key = f"{name} {changes}"
        if key not in made:
            model = build_model(name, **{"head_dim": 64} | wider.get(name, {}) | changes).to(torch.bfloat16)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[key] = (folder, model.float())
        return made[key]

    return get


@pytest.fixture
def open_runtime() -> Iterator[Callable[..., Any]]:
    from bench.gpu.card import release
    from petiole.contract.settings.engine import EngineConfig
    from petiole.gpu_worker.runtime.runtime import ModelRuntime

    opened: list[ModelRuntime] = []

    def get(folder: Path, **settings: Any) -> ModelRuntime:
        defaults: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "max_num_seqs": 8,
            "num_pages": 4096,
            "graph_batch_sizes": (1, 4, 8),
            "cuda_graphs": os.environ.get("PETIOLE_CUDA_GRAPHS", "on"),
        }
        runtime = ModelRuntime(EngineConfig(model=str(folder), **defaults | settings))
        opened.append(runtime)
        return runtime

    yield get
    while opened:
        opened.pop().close()
    release()
