"""The least time that the hardware needs: from measured rates, and from a shape's bytes and operations.

Bandwidth depends on how much is read: weights that fit into the processor's cache never come from memory. So
bandwidth is measured over a working set of the model's own size, with the threads that the engine uses.

A rate is the median of a dozen calls, not the best of them: what is compared with it is a mean over steps or a
median over rounds, so it met whatever else the machine did. The array lies in large pages, as weights do. In small
ones ten arrays were read at 42 to 64 GB/s, each always at its own rate, and in large ones all at 57 to 67."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from bench.harness.checkpoints.decoders import Shape
from bench.harness.report import Report, median_of
from petiole.gpu_worker.models.weights.host_memory import new_tensor

_SIDE = 1024


class Needs(Protocol):
    """What steps of a model read and compute, such as a `Shape`."""

    @property
    def weight_bytes(self) -> int: ...

    def decode_bytes(self, batch: int, context: int) -> int: ...

    def operations(self, tokens: int, context: float, outputs: int) -> float: ...


@dataclass(frozen=True)
class Machine:
    """Measured rates: bytes a second that reading a working set reaches, and operations a second of a matmul."""

    bandwidth: float
    rate: float

    def decode_step_s(self, shape: Needs, batch: int, context: int) -> float:
        """The slower of reading weights and KV, and the arithmetic."""
        reading = shape.decode_bytes(batch, context) / self.bandwidth
        return max(reading, shape.operations(batch, context, batch) / self.rate)

    def prefill_s(self, shape: Needs, tokens: int, cached: int = 0) -> float:
        reading = shape.weight_bytes / self.bandwidth
        return max(reading, shape.operations(tokens, cached + tokens / 2, 1) / self.rate)

    def batch_s(self, shape: Needs, requests: int, prompt: int, output: int, batch: int) -> float:
        """All of `requests`, `batch` at a time: their prompts, then their decode steps."""
        context = prompt + output // 2
        steps = -(-requests // batch) * (output - 1)
        return requests * self.prefill_s(shape, prompt) + steps * self.decode_step_s(shape, batch, context)


def measure(shape: Shape, report: Report | None = None) -> Machine:
    """Measured now, in this process, with torch's threads. Takes about a second."""
    machine = Machine(read_bandwidth(shape.weight_bytes), matrix_rate(shape.dtype))
    if report is not None:
        report.add(f"{shape.name}: reading {shape.weight_bytes / 1e6:,.0f} MB", machine.bandwidth / 1e9, "GB/s")
        report.add(f"{shape.name}: matrix rate", machine.rate / 1e9, "Gop/s")
    return machine


def read_bandwidth(n_bytes: int) -> float:
    """The better of a sum and a dot product over an array of this size, capped at 512 MB."""
    array = new_tensor((max(1, min(n_bytes, 1 << 29) // 4),), torch.float32, torch.device("cpu")).fill_(1)
    number = max(1, int(5e7 // (4 * len(array))))
    works = array.sum, partial(torch.dot, array, array)
    return 4 * len(array) / min(median_of(work, rounds=12, number=number) for work in works)


def matrix_rate(dtype: str) -> float:
    """The better of torch's products in `dtype` and in float32. On a processor without units for bfloat16,
    widening to float32 is faster."""
    sides = [torch.randn(_SIDE, _SIDE).to(kind) for kind in {getattr(torch, dtype), torch.float32}]
    return 2.0 * _SIDE**3 / min(median_of(partial(torch.matmul, a, a), rounds=12) for a in sides)
