"""`stream` and `astream`, which applications call. They are light: what reads comes with the first reader."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from petiole import _lazy

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from petiole.tasks.requests.schemas import StreamDelta
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
    """All deltas of a task, given its `AsyncResult` or its id, from the first one, however late reading begins.

    Raises `StreamTimeout` after `timeout_s` without a delta; the default is no timeout. `cancel_on_disconnect`
    cancels the task when this reader stops, and must be set for the task as well. With `heartbeat_s` there is an
    empty delta, whose `is_heartbeat` is true, after so long without one.
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
