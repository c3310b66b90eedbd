"""A long step says that it makes progress: else a slow processor would be taken for an engine that hangs."""

from __future__ import annotations

import threading

import pytest

from bench.harness.driver import Driver
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.cpu.native import build, stack
from petiole.gpu_worker.runtime.runtime import ModelRuntime


def calls_in_a_prefill(n_sequences: int = 1) -> tuple[list[int], int]:
    """The threads that reported progress, one by one, and the model's layers."""
    runtime = ModelRuntime(EngineConfig(model="petiole-tiny", device="cpu", num_threads=2))
    calls: list[int] = []
    runtime.progress = lambda: calls.append(threading.get_ident())
    try:
        driver = Driver(runtime)
        driver.prefill([driver.sequence(list(range(3, 300))) for _ in range(n_sequences)])
        return calls, runtime._executor._decoder.plan.n_layers
    finally:
        runtime.close()


@pytest.fixture
def reporting(monkeypatch, tmp_path):
    """A function that has the compiled path report after so many seconds."""
    if build.load_library() is None:
        pytest.skip("no C compiler")

    def after(seconds: str) -> None:
        monkeypatch.setenv("PETIOLE_NATIVE", "on")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(stack, "load_library", build.load_library.__wrapped__)
        monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1", f"-DREPORT_S={seconds}"))

    return after


@pytest.mark.parametrize("seconds", ["0.0", "1e9"])
@pytest.mark.slow
def test_the_compiled_path_says_so_between_two_maps(seconds, reporting):
    """Where the step takes longer than these seconds."""
    reporting(seconds)
    calls, layers = calls_in_a_prefill()
    assert len(calls) >= layers if seconds == "0.0" else not calls


@pytest.mark.slow
def test_the_caller_alone_says_so_where_threads_share_the_sequences(reporting):
    """It may hold the interpreter, and another thread would wait for that for ever."""
    reporting("0.0")
    calls, layers = calls_in_a_prefill(4)
    assert len(calls) >= layers
    assert len({*calls}) == 1


def test_the_torch_path_says_so_in_each_layer(monkeypatch):
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    calls, layers = calls_in_a_prefill()
    assert len(calls) >= layers
