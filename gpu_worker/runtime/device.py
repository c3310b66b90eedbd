"""Streams and events, on a CUDA device and on the CPU.

The engine uses three concepts: a *stream* runs enqueued tasks in order and asynchronously; an *event* marks a
point in a stream; a stream or a thread can *wait* for an event. On CUDA these are CUDA's own. On the CPU a stream
is a FIFO executor with its own thread. So the CPU exercises the asynchronous engine: work enqueued too early, or a
buffer overwritten too soon, gives wrong tokens there too.

    engine thread   enqueue(f) record()=e1 enqueue(g) ...        e2.synchronize()
    compute stream            [ f ]        e1  [ g ]                   ^
    copy stream                 wait_event(e1) [copy] e2 --------------'

`Stream.enqueue(fn)` runs `fn` in stream order. On CUDA, `fn` runs at once, on the calling thread, with the stream
current, and the kernels it launches are asynchronous. On the CPU, the stream's thread runs it later. Therefore
`fn` must read only data that is unchanged until the step is committed; slots guarantee this (invariant I6).

Errors are sticky, as on CUDA: after a task has raised, the stream runs no more tasks, its events complete, and
every `synchronize` of the stream or of an event recorded after the failure raises `DeviceError`.

This module imports torch only for host buffers and for a CUDA device, which `cuda_device` has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gpu_worker.errors import EngineError, ModelError

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


class Stream(Protocol):
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

    def new_stream(self, name: str) -> Stream: ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed host tensor for asynchronous copies to and from the device (pinned on CUDA)."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- CPU


class CpuEvent:
    """Completed by the stream's thread. Uses a lock, the fastest way to wake a thread in CPython."""

    __slots__ = ("_done", "_error", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._done = False
        self._error: BaseException | None = None

    def _complete(self, error: BaseException | None) -> None:
        self._error = error
        self._done = True
        self._lock.release()

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        if not self._done:
            with self._lock:  # released by `_complete`; passed on to the next waiter
                pass
        if self._error is not None:
            raise DeviceError(f"work on the CPU device failed: {self._error!r}") from self._error


class CpuStream:
    """A FIFO executor. `jitter`, if given, is called before each task; tests use it for random delays."""

    def __init__(
        self, name: str, *, jitter: Callable[[], None] | None = None, device: CpuDevice | None = None
    ) -> None:
        self.name = name
        self._device = device
        self._jitter = jitter
        self._error: BaseException | None = None
        self._queue: SimpleQueue[tuple[Task, str | None] | CpuEvent | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, task: Task, label: str | None = None) -> None:
        self._queue.put((task, label))

    def record(self) -> CpuEvent:
        event = CpuEvent()
        self._queue.put(event)
        return event

    def wait_event(self, event: Event) -> None:
        self._queue.put((event.synchronize, None))

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        get = self._queue.get
        while (item := get()) is not None:
            if isinstance(item, CpuEvent):
                item._complete(self._error)
            elif self._error is None:
                try:
                    self._run_task(*item)
                except BaseException as error:  # sticky: later events report it to their waiters
                    self._error = error
            del item  # the task references buffers; release them before waiting for the next

    def _run_task(self, task: Task, label: str | None) -> None:
        if self._jitter is not None:
            self._jitter()
        hook = self._device.on_span if self._device is not None else None
        if hook is None or label is None:
            task()
            return
        start = time.perf_counter()
        try:
            task()
        finally:
            hook(self.name, label, start, time.perf_counter())


class CpuDevice:
    """The CPU as a device; each stream has a thread. Only `host_buffer` needs torch."""

    kind: Literal["cpu", "cuda"] = "cpu"

    def __init__(self, *, jitter: Callable[[], None] | None = None) -> None:
        self.on_span: SpanHook | None = None
        self._jitter = jitter
        self._streams: list[CpuStream] = []

    def new_stream(self, name: str) -> CpuStream:
        stream = CpuStream(name, jitter=self._jitter, device=self)
        self._streams.append(stream)
        return stream

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype)

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()


# ---------------------------------------------------------------- both


def staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host tensor for a non-blocking copy to `device`: pinned on CUDA. Torch keeps it until the copy is done."""
    import numpy as np
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to `device` on the current stream. The caller does not wait."""
    return staged(array, device).to(device, non_blocking=True)


def open_device(kind: Literal["auto", "cpu", "cuda"]) -> Device:
    """Open a device. "auto": CUDA if available, else the CPU. Raises ModelError if "cuda" is not available."""
    if kind == "cpu":
        return CpuDevice()
    import torch

    if torch.cuda.is_available():
        from gpu_worker.runtime.cuda_device import CudaDevice

        return CudaDevice()
    if kind == "cuda":
        why = "sees no GPU" if torch.version.cuda else "was built without CUDA"
        raise ModelError(f"the device is to be cuda, but torch {torch.__version__} {why}")
    return CpuDevice()
