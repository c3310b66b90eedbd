"""What applications call. It is cheap to import: the first reader imports the rest."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from petiole import _lazy

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from petiole.contract.results.task_result import End, StreamDelta
    from petiole.tasks.streams import ends, events, readers
else:
    ends = _lazy.module("petiole.tasks.streams.ends")
    events = _lazy.module("petiole.tasks.streams.events")
    readers = _lazy.module("petiole.tasks.streams.readers")

SSE_HEADERS: Mapping[str, str] = MappingProxyType(
    {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
)
"""The headers of a response with server-sent events: no cache and no proxy may hold them back."""


def stream(
    task: AsyncResult | str,
    *,
    timeout_s: float | None = None,
    cancel_on_disconnect: bool = False,
    heartbeat_s: float | None = None,
    prepared: bool = False,
    start: int = 0,
    parsed: bool = False,
) -> readers.Stream:
    """Iterate over all deltas of `task`, an `AsyncResult` or a task's id, however late the reading begins.

    `timeout_s`: raise `StreamTimeout` after this many seconds without a delta; None: wait for ever.
    `heartbeat_s`: after this many seconds without a delta yield an empty one, whose `is_heartbeat` is true.
    `cancel_on_disconnect`: cancel the task when this reader stops. The task must have been submitted with the same
    option.
    `prepared`: also yield, before the first token, the delta that announces the task: its `prepared` says what is
    known of the request before it is admitted.
    `start`: begin with this token, such as the `end` of the last delta that another reader got. What is before it
    is not read. If the token is in the middle of a delta of the log, the text is that of the whole delta.
    `parsed`: each delta has, beside its text, the `content`, `reasoning` and `tool_calls` that the text becomes.
    A call's arguments come in parts, as they are generated. See docs/tools.md.

    Raises the task's own exception after the last delta of a failed task, `StreamExpired` if the log expires
    before it is read, and `StreamError` if Redis stays away for a minute.
    """
    return readers.Stream(
        task,
        timeout_s,
        cancel_on_disconnect,
        heartbeat_s=heartbeat_s,
        prepared=prepared,
        start=start,
        parsed=parsed,
    )


async def astream(
    task: AsyncResult | str,
    *,
    timeout_s: float | None = None,
    cancel_on_disconnect: bool = False,
    heartbeat_s: float | None = None,
    prepared: bool = False,
    start: int = 0,
    parsed: bool = False,
) -> AsyncGenerator[StreamDelta, None]:
    """`stream` for asyncio."""
    reader = readers.AsyncStream(
        task,
        timeout_s,
        cancel_on_disconnect,
        heartbeat_s=heartbeat_s,
        prepared=prepared,
        start=start,
        parsed=parsed,
    )
    async with contextlib.aclosing(reader) as deltas:
        async for delta in deltas:
            yield delta


def end(task: AsyncResult | str) -> End | None:
    """How `task`, an `AsyncResult` or a task's id, has ended: its finish reason, usage, timing, model and error.
    None if it has not ended. This is read from the task's state, and needs no result backend.

    Raises `UnknownTask` if Redis has nothing of such a task. A task that waits in its queue is known if it was
    submitted with `registered`. Raises `Unavailable` if Redis does not answer."""
    return ends.end(task)


async def aend(task: AsyncResult | str) -> End | None:
    """`end` for asyncio."""
    return await ends.aend(task)


def sse(
    task: AsyncResult | str,
    last_event_id: str | None = None,
    *,
    timeout_s: float | None = None,
    cancel_on_disconnect: bool = False,
    heartbeat_s: float | None = 15,
    parsed: bool = False,
) -> Iterator[bytes]:
    """The stream of `task` as server-sent events, for a response with `SSE_HEADERS`.

    `last_event_id`: the request's header `Last-Event-ID`. The events go on after it, each delta once.
    An event's data is the delta as JSON, without fields that are null. The last events are `failed`, if the task
    has failed, and `end`. `heartbeat_s`: after this many seconds without a delta comes a comment.
    `cancel_on_disconnect`: cancel the task when no client has read it for 15 s, so that a client that comes back
    finds it. The task must have been submitted with the same option. The other options are those of `stream`.

    Raises, before the first event: `UnknownTask` if `task` is an id and Redis has nothing of it (submit with
    `registered=True`, so that a queued task is known), `Unavailable` if Redis does not answer, and
    `InvalidRequest` if `last_event_id` is no id of an event.
    """
    return events.sse(
        task,
        last_event_id,
        timeout_s=timeout_s,
        cancel_on_disconnect=cancel_on_disconnect,
        heartbeat_s=heartbeat_s,
        parsed=parsed,
    )


async def asse(
    task: AsyncResult | str,
    last_event_id: str | None = None,
    *,
    timeout_s: float | None = None,
    cancel_on_disconnect: bool = False,
    heartbeat_s: float | None = 15,
    parsed: bool = False,
) -> AsyncIterator[bytes]:
    """`sse` for asyncio: `StreamingResponse(await asse(task_id, last_event_id), headers=SSE_HEADERS)`."""
    return await events.asse(
        task,
        last_event_id,
        timeout_s=timeout_s,
        cancel_on_disconnect=cancel_on_disconnect,
        heartbeat_s=heartbeat_s,
        parsed=parsed,
    )
