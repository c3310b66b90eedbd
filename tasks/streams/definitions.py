"""`stream` and `astream`, which applications call. They are cheap to import: the first reader imports the rest."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from petiole import _lazy

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from petiole.tasks.requests.results import StreamDelta
    from petiole.tasks.streams import readers
else:
    readers = _lazy.module("petiole.tasks.streams.readers")


def stream(
    task: AsyncResult | str,
    *,
    timeout_s: float | None = None,
    cancel_on_disconnect: bool = False,
    heartbeat_s: float | None = None,
) -> readers.Stream:
    """Iterate over all deltas of `task`, an `AsyncResult` or a task's id, however late the reading begins.

    `timeout_s`: raise `StreamTimeout` after this many seconds without a delta; None: wait for ever.
    `heartbeat_s`: after this many seconds without a delta yield an empty one, whose `is_heartbeat` is true.
    `cancel_on_disconnect`: cancel the task when this reader stops. The task must have been submitted with the same
    option.

    Raises the task's own exception after the last delta of a failed task, `StreamExpired` if the log expires
    before it is read, and `StreamError` if Redis stays away for a minute.
    """
    return readers.Stream(task, timeout_s, cancel_on_disconnect, heartbeat_s=heartbeat_s)


async def astream(
    task: AsyncResult | str,
    *,
    timeout_s: float | None = None,
    cancel_on_disconnect: bool = False,
    heartbeat_s: float | None = None,
) -> AsyncGenerator[StreamDelta, None]:
    """`stream` for asyncio."""
    reader = readers.AsyncStream(task, timeout_s, cancel_on_disconnect, heartbeat_s=heartbeat_s)
    async with contextlib.aclosing(reader) as deltas:
        async for delta in deltas:
            yield delta
