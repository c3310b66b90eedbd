"""A long step says that it makes progress: else a slow processor would be taken for an engine that hangs."""

from __future__ import annotations

import pytest

from bench.harness.driver import Driver
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.cpu.native import build, stack
from petiole.gpu_worker.runtime.runtime import ModelRuntime


def calls_in_a_prefill() -> tuple[int, int]:
    """How often progress was reported, and the model's layers."""
    runtime = ModelRuntime(EngineConfig(model="petiole-tiny", device="cpu", num_threads=2))
    calls: list[None] = []
    runtime.progress = lambda: calls.append(None)
    try:
        driver = Driver(runtime)
        driver.prefill([driver.sequence(list(range(3, 300)))])
        return len(calls), runtime._executor._decoder.plan.n_layers
    finally:
        runtime.close()


@pytest.mark.parametrize("seconds", ["0.0", "1e9"])
@pytest.mark.slow
def test_the_compiled_path_says_so_between_two_maps(seconds, monkeypatch, tmp_path):
    """Where the step takes longer than these seconds."""
    if build.load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stack, "load_library", build.load_library.__wrapped__)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1", f"-DREPORT_S={seconds}"))
    calls, layers = calls_in_a_prefill()
    assert calls >= layers if seconds == "0.0" else calls == 0


def test_the_torch_path_says_so_in_each_layer(monkeypatch):
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    calls, layers = calls_in_a_prefill()
    assert calls >= layers
