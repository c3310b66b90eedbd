"""Device streams and events: the interface of a device.

The engine uses three concepts: a *device stream* runs enqueued tasks in order and asynchronously; an *event* marks
a point in it; a device stream or a thread can *wait* for an event. Below, a stream is a device stream. On CUDA
these are CUDA's own. On the CPU a stream is a FIFO executor with its own thread. So the CPU exercises the
asynchronous engine: work enqueued too early, or a buffer overwritten too soon, gives wrong tokens there too.

    engine thread   enqueue(f) record()=e1 enqueue(g) ...        e2.synchronize()
    compute stream            [ f ]        e1  [ g ]                   ^
    copy stream                 wait_event(e1) [copy] e2 --------------'

`enqueue(fn)` runs `fn` in stream order. On CUDA, `fn` runs at once, on the calling thread, with the stream
current, and the kernels it launches are asynchronous. On the CPU, the stream's thread runs it later. Therefore
`fn` must read only data that is unchanged until the step is committed; slots guarantee this (invariant I6).

Errors are sticky, as on CUDA: after a task has raised, the stream runs no more tasks, its events complete, and
every `synchronize` of the stream or of an event recorded after the failure raises `DeviceError`.

`cpu` and `cuda` implement it. This module imports torch only for host buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from petiole.gpu_worker.errors import EngineError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

Task = Callable[[], object]
SpanHook = Callable[[str, str, float, float], None]
"""Called with (stream name, label, start, end), seconds of `time.perf_counter`, for each labelled task."""


class DeviceError(EngineError):
    """Work on the device failed. Later results are invalid: fatal for the engine."""


class Event(Protocol):
    """A point in a stream. Completes once; each step records a new one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Wait for the work before this point, but not for later work."""
        ...


class DeviceStream(Protocol):
    """Runs tasks in the order of `enqueue`. `label` names a task in traces."""

    name: str

    def enqueue(self, task: Task, label: str | None = None) -> None: ...

    def record(self) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """Make later tasks run after `event`. The caller does not wait."""
        ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """Creates streams and host buffers. Each engine has its own."""

    kind: Literal["cpu", "cuda"]
    on_span: SpanHook | None

    def new_stream(self, name: str) -> DeviceStream: ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed host tensor for asynchronous copies to and from the device (pinned on CUDA)."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host tensor for a non-blocking copy to `device`: pinned on CUDA. Torch keeps it until the copy is done."""
    import numpy as np
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to `device` on the current stream. The caller does not wait."""
    return staged(array, device).to(device, non_blocking=True)
