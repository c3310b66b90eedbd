"""Captures the kernels that a task launches as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.runtime.device.cuda import CudaStream


class Capture(Protocol):
    """Captures the kernels that a task launches as a graph. Returns the function that replays them."""

    def __call__(self, work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
        """`kept`: the graph stays, and shares the other graphs' memory. Otherwise it has memory of its own, which
        is freed with it."""
        ...


def cuda_capture(stream: CudaStream) -> Capture:
    """A `Capture` on CUDA. It raises MachineError, after which the process must exit: a failed capture leaves
    torch's allocator and generators in capture mode. Ending a failed capture raises too, which must not hide the
    cause."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
        stream.synchronize()
        graph, causes = torch.cuda.CUDAGraph(), list[Exception]()
        try:
            with torch.cuda.graph(
                graph,
                stream=stream.raw,
                pool=pool if kept else None,
                capture_error_mode="thread_local",  # other threads pin memory for adapters during a reload
            ):
                try:
                    work()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception as error:
            cause = (causes or [error])[0]
            raise MachineError(
                f"a step could not be captured as a CUDA graph ({type(cause).__name__}: {cause}); "
                f"PETIOLE_CUDA_GRAPHS=off serves without graphs, more slowly"
            ) from cause
        return graph.replay

    return capture


def eager(work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
    """A `Capture` that captures nothing: the replay runs the task, which uses the same buffers."""
    return work
