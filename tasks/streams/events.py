"""A task's stream as server-sent events: what the view of a web app sends, in any framework.

    id: 12                                     the tokens sent so far; "12.end" in the last delta
    data: {"index": 11, "text": " leaf", ...}  a delta, as JSON

    event: failed                              the task's own exception; nothing follows
    data: {"error": "...", "type": "..."}

    event: end                                 nothing follows: the page closes its `EventSource`
    data: {}

A browser that loses its connection asks again with the last `id` in the header `Last-Event-ID`, and gets the next
delta. If the reader fails (Redis stays away, no delta in time), the events end without `end`, so the browser asks
again by itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from celery.result import AsyncResult

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.errors import InvalidRequest, StreamError, StreamExpired
from petiole.tasks.streams import ends
from petiole.tasks.streams.readers import AsyncStream, Stream

ALIVE = b": alive\n\n"
END = b"event: end\ndata: {}\n\n"
LAST = ".end"
UNREAD_S = 15
_MOST_DIGITS = 15


class Events:
    """Which bytes follow from which delta. It knows no connection."""

    def __init__(self, last_event_id: str | None, *, parsed: bool) -> None:
        """Raises InvalidRequest if the id is none that `of` writes."""
        self._after, self._has_all = position(last_event_id)
        self.start = 0 if parsed else self._after

    def of(self, delta: StreamDelta) -> bytes:
        if delta.is_heartbeat:
            return ALIVE
        last = delta.finish_reason is not None
        if self._has_all if last else delta.end <= self._after:
            return b""  # the client has it: parsed deltas follow from the text before them, so all are read
        data = delta.model_dump_json(exclude_none=True, exclude={"task_id"})
        return f"id: {delta.end}{LAST * last}\ndata: {data}\n\n".encode()

    def failed(self, error: Exception) -> bytes:
        """What ends the events. Nothing, if only the reader has failed: then the client asks again."""
        if isinstance(error, StreamError) and not isinstance(error, StreamExpired):
            return b""
        data = json.dumps({"error": str(error), "type": type(error).__name__})
        return f"event: failed\ndata: {data}\n\n".encode() + END


def position(last_event_id: str | None) -> tuple[int, bool]:
    """The number of tokens that the client has, and whether it has the last delta."""
    if not last_event_id:
        return 0, False
    tokens = last_event_id.removesuffix(LAST)
    if not (tokens.isascii() and tokens.isdigit() and len(tokens) <= _MOST_DIGITS):
        raise InvalidRequest("Last-Event-ID", "must be the id of an event of this stream", last_event_id)
    return int(tokens), tokens != last_event_id


def sse(task: AsyncResult | str, last_event_id: str | None, *, parsed: bool, **options: Any) -> Iterator[bytes]:
    events = Events(last_event_id, parsed=parsed)
    if isinstance(task, str):
        ends.end(task)
    return _written(events, Stream(task, start=events.start, parsed=parsed, unread_s=UNREAD_S, **options))


def _written(events: Events, reader: Stream) -> Iterator[bytes]:
    with reader:
        try:
            for delta in reader:
                if out := events.of(delta):
                    yield out
        except Exception as error:  # the status is sent
            if out := events.failed(error):
                yield out
        else:
            yield END


async def asse(
    task: AsyncResult | str, last_event_id: str | None, *, parsed: bool, **options: Any
) -> AsyncIterator[bytes]:
    events = Events(last_event_id, parsed=parsed)
    if isinstance(task, str):
        await ends.aend(task)
    return _awritten(events, AsyncStream(task, start=events.start, parsed=parsed, unread_s=UNREAD_S, **options))


async def _awritten(events: Events, reader: AsyncStream) -> AsyncIterator[bytes]:
    try:
        async for delta in reader:
            if out := events.of(delta):
                yield out
    except Exception as error:  # the status is sent
        if out := events.failed(error):
            yield out
    else:
        yield END
    finally:
        await reader.aclose()
