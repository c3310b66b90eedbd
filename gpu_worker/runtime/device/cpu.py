"""The CPU as a device: a stream is a first-in-first-out executor with a thread of its own. See `interface`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from petiole.gpu_worker.runtime.device.device import DeviceError, DeviceEvent, SpanHook, Task

if TYPE_CHECKING:
    import torch


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

    def wait_event(self, event: DeviceEvent) -> None:
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
    tasks_wait = True

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
