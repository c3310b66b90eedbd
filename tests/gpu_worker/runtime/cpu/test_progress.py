"""A long step says that it makes progress: else a slow processor would be taken for an engine that hangs."""

from __future__ import annotations

import threading

import pytest

from bench.driver import Driver
from petiole.gpu_worker.config import EngineConfig
from petiole.gpu_worker.runtime.cpu.native import build, stack
from petiole.gpu_worker.runtime.runtime import ModelRuntime


def calls_in_a_prefill() -> list[int]:
    runtime = ModelRuntime(EngineConfig(model="petiole-tiny", device="cpu", num_threads=2))
    on: list[int] = []
    runtime.progress = lambda: on.append(threading.get_ident())
    try:
        driver = Driver(runtime)
        driver.prefill([driver.sequence(list(range(3, 300)))])
    finally:
        runtime.close()
    return on


def test_the_compiled_path_says_so_between_two_maps(monkeypatch, tmp_path):
    if build.load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stack, "load_library", build.load_library.__wrapped__)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1", "-DREPORT_S=0.0"))
    assert len(calls_in_a_prefill()) > 10


def test_a_short_step_says_nothing(monkeypatch):
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    if build.load_library() is None:
        pytest.skip("no C compiler")
    assert calls_in_a_prefill() == []


def test_the_torch_path_says_so_in_each_layer(monkeypatch):
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    assert calls_in_a_prefill()
