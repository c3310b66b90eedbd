"""How an engine starts: the thread that serves warms up, and what fails leaves nothing behind."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Engine, EngineConfig, ModelError
from petiole.gpu_worker.engine.loading import load_beside
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.runtime import runtime as module
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE
from petiole.gpu_worker.runtime.interface import Progress, StepBatch, nothing
from petiole.gpu_worker.runtime.model_files import ModelInfo, ModelReader
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from tests.support.toy_engine import request


def test_the_thread_that_serves_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library keeps for each thread (a handle of cuBLAS, say) is there before the first request."""
    callers: list[str] = []

    class Watched(ModelRuntime):
        def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
            callers.append(threading.current_thread().name)
            super().launch_forward(slot_id, batch)

    monkeypatch.setattr(module, "ModelRuntime", Watched)
    with Engine(EngineConfig(device="cpu", num_pages=64)) as engine:
        warmed_up = list(callers)
        engine.generate([request([5, 6], 3)])
    assert warmed_up
    assert set(callers) == {"engine"}


def test_a_warm_up_without_room_is_the_models_fault_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cramped(ModelRuntime):
        def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(module, "ModelRuntime", Cramped)
    before = set(threading.enumerate())
    engine = Engine(EngineConfig(device="cpu", num_pages=64))
    with pytest.raises(ModelError, match="does not fit into memory"):
        engine.start()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"engine", "text", "stream-compute"}


def test_a_vocabulary_that_cannot_be_read_is_told_while_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is made beside them, and nobody waits for the rest of them."""

    def read(reader: ModelReader, info: ModelInfo, progress: Progress = nothing) -> Decoder:
        for _ in range(6000):  # until the vocabulary has failed
            progress()
            time.sleep(0.01)
        raise AssertionError("nothing was told in a minute")

    monkeypatch.setattr(ModelReader, "read", read)
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("petiole-tiny"), folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Engine(EngineConfig(model=str(folder), device="cpu", num_pages=64))


def test_a_vocabulary_that_cannot_be_read_leaves_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were read before it failed."""
    closed: list[ModelRuntime] = []
    are_read = threading.Event()

    class Watched(ModelRuntime):
        def __init__(self, config: EngineConfig, **options: Any) -> None:
            super().__init__(config, **options)
            are_read.set()

        def close(self) -> None:
            closed.append(self)
            super().close()

    def text(config: EngineConfig) -> None:
        are_read.wait()
        raise ModelError("no vocabulary")

    monkeypatch.setattr(module, "ModelRuntime", Watched)
    with pytest.raises(ModelError, match="no vocabulary"):
        load_beside(EngineConfig(device="cpu", num_pages=64), NO_TRACE, text)
    assert len(closed) == 1
