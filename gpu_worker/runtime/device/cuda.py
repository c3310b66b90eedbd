"""CUDA's streams and events in the engine's terms: see `interface`."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal

import torch

from petiole.gpu_worker.runtime.device.device import DeviceError, DeviceEvent, SpanHook, Task

_NOTHING: AbstractContextManager[None] = nullcontext()


def capability(place: torch.device) -> tuple[int, int]:
    """The compute capability of a card; (0, 0) where there is none."""
    return torch.cuda.get_device_capability(place) if place.type == "cuda" else (0, 0)


def architecture(place: torch.device) -> str:
    """The architecture for which kernels are compiled, such as "sm_90"; empty where there is no card."""
    return "sm_{}{}".format(*capability(place)) if place.type == "cuda" else ""


class CudaEvent:
    """A `torch.cuda.Event` whose failed wait raises `DeviceError`."""

    __slots__ = ("raw",)

    def __init__(self, raw: torch.cuda.Event) -> None:
        self.raw = raw

    def query(self) -> bool:
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        try:
            self.raw.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the CUDA device failed: {error}") from error


class CudaStream:
    """A CUDA stream. `enqueue` runs the task at once, with the stream current."""

    def __init__(self, name: str, raw: torch.cuda.Stream, device: CudaDevice) -> None:
        self.name = name
        self.raw = raw
        self._device = device

    def enqueue(self, task: Task, label: str | None = None) -> None:
        timed = self._device.timed_span(self, label) if label is not None else _NOTHING
        before = torch.cuda.current_stream(self._device.index)
        torch.cuda.set_stream(self.raw)  # the context manager, torch.cuda.stream, takes more than twice as long
        try:
            with timed:
                task()
        finally:
            torch.cuda.set_stream(before)

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return CudaEvent(event)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        try:
            self.raw.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the CUDA device failed: {error}") from error


class _TimedSpan:
    """A pair of timing events around a task, read once the device has passed them."""

    def __init__(self, device: CudaDevice, stream: CudaStream, label: str) -> None:
        self.stream, self.label, self._device = stream, label, device
        self.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        self.start.record(self.stream.raw)

    def __exit__(self, *_: object) -> None:
        self.end.record(self.stream.raw)
        self._device._spans.append(self)


class CudaDevice:
    """The current CUDA device."""

    kind: Literal["cpu", "cuda"] = "cuda"
    tasks_wait = False

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.on_span: SpanHook | None = None
        self._spans: deque[_TimedSpan] = deque()
        self._origin: tuple[torch.cuda.Event, float] | None = None

    def new_stream(self, name: str) -> CudaStream:
        raw = torch.cuda.Stream(device=self.torch_device)  # type: ignore[no-untyped-call]
        return CudaStream(name, raw, self)

    def timed_span(self, stream: CudaStream, label: str) -> AbstractContextManager[Any]:
        """Time a labelled task if tracing is on, and pass on the spans that have ended. The first call aligns the
        clocks of device and host."""
        if self.on_span is None or torch.cuda.is_current_stream_capturing():
            return _NOTHING
        if self._origin is None:
            torch.cuda.synchronize(self.torch_device)
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(stream.raw)
            event.synchronize()
            self._origin = (event, time.perf_counter())
        self._pass_spans_on()
        return _TimedSpan(self, stream, label)

    def _pass_spans_on(self) -> None:
        """Pass the spans that have ended to the hook, oldest first. Does not wait.

        CUDA gives the time between two events as 32 bits of milliseconds. After an hour, times since the first
        span are known only to a quarter of a millisecond. So the length of a span is measured between its own two
        events."""
        while self._spans and self._spans[0].end.query():  # type: ignore[no-untyped-call]
            span = self._spans.popleft()
            assert self.on_span is not None
            assert self._origin is not None
            event, host = self._origin
            start = host + event.elapsed_time(span.start) / 1e3
            self.on_span(span.stream.name, span.label, start, start + span.start.elapsed_time(span.end) / 1e3)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.torch_device)
            self._pass_spans_on()
        except RuntimeError as error:
            raise DeviceError(f"the CUDA device failed: {error}") from error

    def close(self) -> None:
        if self._spans:  # only a traced device has any
            with suppress(DeviceError):
                self.synchronize()
