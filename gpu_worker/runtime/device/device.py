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

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from petiole.gpu_worker.exceptions import EngineError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Task = Callable[[], object]
SpanHook = Callable[[str, str, float, float], None]
"""Called with (stream name, label, start, end), seconds of `time.perf_counter`, for each labelled task."""


class DeviceError(EngineError):
    """Work on the device failed. Later results are invalid: fatal for the engine."""


class DeviceEvent(Protocol):
    """A point in a stream. Completes once; each step records a new one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Wait for the work before this point, but not for later work."""
        ...


class DeviceStream(Protocol):
    """Runs tasks in the order of `enqueue`. `label` names a task in traces."""

    name: str

    def enqueue(self, task: Task, label: str | None = None) -> None: ...

    def record(self) -> DeviceEvent: ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later tasks run after `event`. The caller does not wait."""
        ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """Creates streams and host buffers. Each engine has its own. tasks_wait: a task of a stream runs when all
    before it are done, and may read what they made. False: it runs at once and only enqueues, so the host must
    know all shapes."""

    kind: Literal["cpu", "cuda"]
    tasks_wait: bool
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


def upload_together(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """`upload` of several arrays; on CUDA in one copy, since each costs the host as much as a small kernel."""
    if device.type == "cpu" or len(arrays) == 1:
        return [upload(array, device) for array in arrays]
    return unpacked(packed(arrays, pinned=True).to(device, non_blocking=True), arrays)


_ALIGNMENT = 16
"""Packed arrays begin at multiples of this many bytes, because kernels are compiled for such pointers."""


def packed(arrays: Sequence[npt.NDArray[Any]], *, pinned: bool) -> torch.Tensor:
    """uint8: the arrays one after the other, in memory of the host."""
    import torch

    buffer = torch.empty(sum(map(_room, arrays)), dtype=torch.uint8, pin_memory=pinned)
    target, at = buffer.numpy(), 0
    for array in arrays:
        target[at : at + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        at += _room(array)
    return buffer


def unpacked(buffer: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Views of a `packed` buffer, with types and shapes of the arrays in it."""
    import torch

    parts = torch.split(buffer, [_room(array) for array in arrays])
    return [_view(part, array) for part, array in zip(parts, arrays, strict=True)]


def _view(part: torch.Tensor, array: npt.NDArray[Any]) -> torch.Tensor:
    """A view, made in as few operations as possible: each costs the host about a microsecond."""
    typed = part.view(_torch_dtype(array.dtype))
    if typed.numel() > array.size:
        typed = typed[: array.size]
    return typed if array.ndim == 1 else typed.view(array.shape)


def _room(array: npt.NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import numpy as np
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype
