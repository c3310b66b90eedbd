"""A card, and a model of random weights on it: shared by the parts of `bench.gpu`."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.harness.checkpoints.decoders import QWEN3_06B, Described, Shape, config
from bench.harness.checkpoints.moondream import Seeing
from bench.harness.checkpoints.random_weights import RandomWeights
from bench.harness.load import let_go, settle
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture
from petiole.gpu_worker.runtime.device.cuda import CudaDevice
from petiole.gpu_worker.runtime.runtime import ModelRuntime

QWEN3_8B = Shape("Qwen3-8B shape, bf16", "bfloat16", 151_936, 4096, 12_288, 36, 32, 8, 128, max_positions=16_384)
SMALL = dataclasses.replace(QWEN3_06B, max_positions=4096)
GRAPHS = os.environ.get("PETIOLE_CUDA_GRAPHS", "on")


@dataclass(frozen=True)
class Card:
    """bandwidth: bytes a second; rate: bf16 operations a second."""

    bandwidth: float
    rate: float


def release() -> None:
    """Free the memory of closed runtimes, whose graphs and decoders refer to each other."""
    let_go()
    torch.cuda.empty_cache()


class opened:  # noqa: N801 - reads as what it is, a context
    """A runtime of random weights, closed at the end; and the folder with its `config.json`."""

    def __init__(
        self,
        shape: Shape | Seeing | Described,
        device: str = "cuda",
        source: RandomWeights | None = None,
        **settings: object,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        raw = config(shape) if isinstance(shape, Shape) else shape.raw
        (Path(self.folder) / "config.json").write_text(json.dumps(raw))
        fixed = {"model": self.folder, "device": device, "dtype": shape.dtype, "cuda_graphs": GRAPHS}
        engine = EngineConfig(**fixed | settings)  # type: ignore[arg-type]
        self._runtime = ModelRuntime(engine, source=source or RandomWeights())
        self.config = self._runtime.config

    def __enter__(self) -> ModelRuntime:
        settle()
        return self._runtime

    def __exit__(self, *_: object) -> None:
        self._runtime.close()
        del self._runtime
        self._folder.cleanup()


def seconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median by device events, after a warm-up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def captured_seconds(work: Callable[[], object]) -> float:
    """Median of what the device alone takes, as a captured step."""
    device = CudaDevice()

    def once() -> None:
        with torch.inference_mode():
            work()

    once()
    device.synchronize()
    return seconds(cuda_capture(device.new_stream("compute"))(once))


@contextmanager
def switched(switches: dict[str, str]) -> Iterator[None]:
    """With these variables of the environment, which are put back."""
    before = {name: os.environ.get(name) for name in switches}
    os.environ |= switches
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def untimed(kernels: str) -> AbstractContextManager[None]:
    """With kernels that are not the default: see `runtime.cuda.supported.tried`."""
    return switched({"PETIOLE_UNTIMED": kernels})


def copy_bandwidth() -> float:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def matrix_rate(side: int = 8192) -> float:
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return float(2 * side**3 / seconds(lambda: a @ b, rounds=10))


def tokens(n: int) -> list[int]:
    return random.Random(n).choices(range(10, 150_000), k=n)
