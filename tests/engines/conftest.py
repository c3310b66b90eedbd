"""Each engine that a worker may run. The stand-in is a real child with vLLM's place taken; vLLM itself runs where
PETIOLE_VLLM_PYTHON names an interpreter that has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.contract.settings.engine import EngineConfig
from petiole.engines.vllm import VllmEngine
from petiole.gpu_worker import Engine
from petiole.gpu_worker.engine.serving import Serving

SUPPORT = Path(__file__).parent.parent / "support"
STAND_IN, UNTORCHED = SUPPORT / "stand_in", SUPPORT / "untorched"
VLLM = os.environ.get("PETIOLE_VLLM_PYTHON", "")
SMALL = "--dtype float32 --enforce-eager --max-num-seqs 8"

Make = Callable[..., Serving[Any]]


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the stand-in in vLLM's place."""
    path = tmp_path_factory.mktemp("stand-in") / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def stand_in(interpreter: str) -> Iterator[Make]:
    """Makes engines with the stand-in; each is shut down in the end."""
    made: list[VllmEngine] = []

    def make(**settings: Any) -> VllmEngine:
        config = EngineConfig(**{"vllm_python": interpreter, "max_model_len": 256} | settings)
        made.append(VllmEngine(config))
        return made[-1].start()

    yield make
    for engine in made:
        engine.shutdown(drain=False)


@pytest.fixture(scope="module", params=["petiole", "stand-in", "vllm"])
def engine(request: pytest.FixtureRequest, interpreter: str) -> Iterator[Serving[Any]]:
    if request.param == "petiole":
        made: Serving[Any] = Engine(EngineConfig(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=8))
    elif request.param == "stand-in":
        made = VllmEngine(EngineConfig(vllm_python=interpreter, max_model_len=256))
    elif not VLLM:
        pytest.skip("PETIOLE_VLLM_PYTHON names no interpreter with vLLM")
    else:
        made = VllmEngine(EngineConfig(vllm_python=VLLM, max_model_len=256, vllm_args=SMALL))
    with made:
        yield made
