"""A client's stream, as a protocol without input or output: deltas of tasks in, numbered events as bytes out.

    stream = ClientStream(view, record, after)
    stream.begin()                  what is known before the first delta
    stream.read(choice, delta)      each delta of each task
    stream.finished                 whether all tasks have ended: then `read` has returned the last events

Each output of a request (a choice) has numbers of its own, because nothing says which of two choices' tokens came
first. What a client has is the number of each: its *cursor*, `12` or with several choices `12.7`. It is the `id`
of a server-sent event, and comes back as `Last-Event-ID` or `starting_after`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.events import EventNumbering, StreamEvent
from petiole.gateway.core.failures import invalid
from petiole.gateway.core.parts import Part
from petiole.gateway.core.record import RequestRecord


class View(Protocol):
    """An interface's own: which events a part makes, and how an event is written. A view is made from a record,
    for one stream. It may remember parts, and nothing else."""

    def begin(self, choice: int) -> Iterable[StreamEvent]:
        """What comes before the first part of a choice."""

    def events(self, choice: int, part: Part) -> Iterable[StreamEvent]: ...

    def finish(self) -> Iterable[StreamEvent]:
        """What comes when all choices have ended. These events have numbers of the first choice."""

    def encode(self, choice: int, number: int, event: StreamEvent) -> bytes: ...

    def event_name(self, event: StreamEvent) -> str | None:
        """What the `event:` line says, if there is one."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One server-sent event."""

    cursor: str
    name: str | None
    data: bytes


class ClientStream:
    def __init__(self, view: View, record: RequestRecord, after: Sequence[int] = ()) -> None:
        choices = range(len(record.tasks))
        self._view = view
        self._numbers = [EventNumbering(after[choice] if after else -1) for choice in choices]
        self._readings = [OutputAssembler.of(record, choice) for choice in choices]
        self._running = set(choices)
        self._alone = len(choices) == 1

    @property
    def finished(self) -> bool:
        return not self._running

    @property
    def cursor(self) -> str:
        return ".".join([str(one.last) for one in self._numbers])

    def begin(self) -> list[Frame]:
        frames: list[Frame] = []
        for choice in sorted(self._running):
            self._write(choice, self._view.begin(choice), frames)
        return frames

    def read(self, choice: int, delta: StreamDelta) -> list[Frame]:
        frames: list[Frame] = []
        for part in self._readings[choice].read(delta):
            self._write(choice, self._view.events(choice, part), frames)
        if delta.finish_reason is not None:
            self._running.discard(choice)
            if self.finished:
                self._write(0, self._view.finish(), frames)
        return frames

    def _write(self, choice: int, events: Iterable[StreamEvent], frames: list[Frame]) -> None:
        """Append the frames of what the client lacks of these events."""
        numbers, view = self._numbers[choice], self._view
        for event in events:
            if (rest := numbers.number(event)) is not None:
                cursor = str(numbers.last) if self._alone else self.cursor
                data = view.encode(choice, numbers.last, rest)
                frames.append(Frame(cursor, view.event_name(rest), data))


def cursor_of(text: str, choices: int) -> list[int]:
    """A cursor that a client gives. Raises `Failure`."""
    numbers = text.split(".")
    if len(numbers) != choices or not all(re.fullmatch("-1|[0-9]{1,16}", one) for one in numbers):
        form = "a sequence number" if choices == 1 else f"{choices} sequence numbers with dots between them"
        raise invalid("starting_after", f"starting_after: must be {form}, got {text[:64]!r}")
    return [int(one) for one in numbers]
