"""Chrome traces of the engine, for chrome://tracing or ui.perfetto.dev.

Host spans (plan, launch, mask, sample, wait, commit) come from the engine thread, device spans (forward, sample,
copy) from the streams. Each thread and each stream is one line of the trace; every span has its slot and step.
Device spans do not record their step. But streams are FIFO and each step enqueues one forward (named by the step's
kind), one sampling and one copy, so the n-th of each belongs to step n. All other device spans belong to no step.
A mark shows where a sequence ended, with its last transitions.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

Span = AbstractContextManager[None]

_FORWARDS = ("prefill", "decode", "verify", "mixed", "encode", "forward")


class Tracer:
    """Collects spans from any thread. `enabled=False` costs a method call for each span."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._origin = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._marks: list[dict[str, Any]] = []
        self._lines: dict[str, int] = {}
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._slot_of: dict[int, int | None] = {}

    def reset(self) -> None:
        """Drop all spans, such as those of a warm-up, and count steps from 0."""
        with self._lock:
            self._events.clear()
            self._marks.clear()
            self._counts.clear()
            self._slot_of.clear()

    def span(self, name: str, slot_id: int | None = None, step_id: int | None = None) -> Span:
        """A context manager that records a span on the calling thread."""
        if not self.enabled:
            return _NOTHING
        return _Span(self, name, {"slot": slot_id, "step": step_id})

    def record_device(self, stream: str, label: str, start: float, end: float) -> None:
        """A task on a device's stream; a `Device.on_span` hook."""
        step_id = None
        stage = "forward" if label in _FORWARDS else label
        if stage in ("forward", "sample", "copy"):
            step_id = self._counts.get((stream, stage), 0)
            self._counts[stream, stage] = step_id + 1
        self.record(stream, label, start, end, {"step": step_id})

    def mark(self, name: str, args: dict[str, str]) -> None:
        """An instant on the calling thread."""
        if not self.enabled:
            return
        with self._lock:
            line = self._lines.setdefault(threading.current_thread().name, len(self._lines))
            at = (time.perf_counter() - self._origin) * 1e6
            self._marks.append(
                {"name": name, "ph": "i", "s": "t", "pid": os.getpid(), "tid": line, "ts": at, "args": args}
            )

    def record(
        self, line: str, name: str, start: float, end: float, args: dict[str, int | None] | None = None
    ) -> None:
        """A span on a line of the picture; times of `time.perf_counter`."""
        if not self.enabled:
            return
        args = args or {}
        with self._lock:
            tid = self._lines.setdefault(line, len(self._lines))
            step_id = args.get("step")
            if step_id is not None and args.get("slot") is not None:
                self._slot_of[step_id] = args["slot"]
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": os.getpid(),
                    "tid": tid,
                    "ts": (start - self._origin) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": args,
                }
            )

    def spans(self) -> list[dict[str, Any]]:
        """What was collected so far: Chrome's event dictionaries, with `line` added and every slot filled in."""
        with self._lock:
            names = {tid: line for line, tid in self._lines.items()}
            return [
                {
                    **event,
                    "line": names[event["tid"]],
                    "args": {"slot": self._slot_of.get(event["args"].get("step")), **event["args"]},
                }
                for event in self._events
            ]

    def save(self, path: str | Path) -> None:
        """Write Chrome's JSON."""
        spans = self.spans()
        lines = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": tid, "args": {"name": line}}
            for line, tid in self._lines.items()
        ]
        document = {"traceEvents": [*lines, *spans, *self._marks], "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")


class _Span(AbstractContextManager[None]):
    __slots__ = ("_args", "_name", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, int | None]) -> None:
        self._tracer, self._name, self._args = tracer, name, args
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        line = threading.current_thread().name
        self._tracer.record(line, self._name, self._start, time.perf_counter(), self._args)


_NOTHING: Span = nullcontext()
NO_TRACE = Tracer(enabled=False)
