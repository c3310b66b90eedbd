"""One connection for the commands of all callers of an event loop.

redis-py takes a connection out of a pool for each round trip and gives it back, behind locks, and limits the time
of each write and each read by itself. Around a round trip on the same machine that is most of the processor time.
Here callers write at once, one behind the other. Redis replies in order, so one asyncio task reads all replies, as
long as any are due.

A caller who no longer waits has sent its commands all the same. If the connection is lost, so is whatever is on
its way: each caller gets an error, and the next one connects again. Like a connection of a pool, this one is
checked by a write that changes nothing: here it goes ahead of the caller's commands."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import redis

from petiole.tasks.servers import redis_py
from petiole.tasks.servers.failover import CHECK

Commands = Sequence[tuple[Any, ...]]


class _Call:
    """One caller's commands. `lost`: why no further replies come."""

    def __init__(self, number: int) -> None:
        self.replies: list[Any] = []
        self.number = number
        self.lost: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class SharedConnection:
    """A connection of a pool's kind, beside those that the pool counts."""

    def __init__(self, pool: Any, reply_timeout_s: float) -> None:
        self._pool, self._reply_timeout_s = pool, reply_timeout_s
        self._connection: Any = None
        self._opening: asyncio.Task[Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: deque[_Call] = deque()

    async def send(self, commands: Commands) -> list[Any]:
        """The replies, some of which may be `redis.ResponseError`s. Raises `connections.LOST`."""
        connection = self._connection
        if not self._is_usable(connection):
            connection = await self._open()
            if connection is not self._connection:
                raise redis.ConnectionError("the connection is lost")
        checked = connection.checked
        packed = connection.pack_commands(commands if checked else [CHECK, *commands])
        call = _Call(len(commands) + (not checked))
        self._calls.append(call)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(connection, self._calls))
        connection.write(packed)
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                await call.done
        except TimeoutError:
            await self._lose(connection, "it does not reply")
            raise redis.TimeoutError("Redis does not reply") from None
        if call.lost is not None:
            raise redis.ConnectionError(f"the connection is lost: {call.lost}")
        if not checked:
            connection.checked_at = time.monotonic()
            del call.replies[0]
        return call.replies

    def _is_usable(self, connection: Any) -> bool:
        """Whether it is open, and leads to a master as far as this process knows."""
        if connection is None or not connection.is_connected:
            return False
        if connection.was_checked and connection.suspect:
            return False
        return not connection.has_ended

    async def _open(self) -> Any:
        """Callers who come meanwhile share the attempt."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(_retrieved)
        return await asyncio.shield(self._opening)

    async def _connect(self) -> Any:
        try:
            if self._connection is not None:
                await self._lose(self._connection, "it is closed, or leads to a replica")
            connection = self._pool.make_connection()
            connection.replies_elsewhere = True
            await connection.connect()
            self._connection = connection
            return connection
        finally:
            self._opening = None

    async def _lose(self, connection: Any, why: str) -> None:
        """Give it up, once."""
        if connection is not self._connection:
            return
        self._connection = self._reading = None
        calls, self._calls = self._calls, deque()
        for call in calls:
            call.lost = why
            call.end()
        await connection.disconnect(nowait=True)

    async def _read(self, connection: Any, calls: deque[_Call]) -> None:
        due, take, lose = calls.__len__, partial(_take, calls), partial(self._lose, connection)
        await read_while(due, connection, take, lose)


async def read_while(
    due: Callable[[], object],
    connection: Any,
    take: Callable[[Any], object],
    lose: Callable[[str], Awaitable[object]],
) -> None:
    """Read replies as long as any are due. `take` gets each, a `redis.ResponseError` among them as it is. If no
    more can be read, `lose` gets the reason."""
    try:
        while due():
            try:
                take(await connection.read_response(**redis_py.UNTIL_SOMETHING_COMES))
            except redis.ResponseError as error:
                take(error.with_traceback(None))
            if due():
                for reply in connection.read_along():
                    take(reply)
    except Exception as error:
        await lose(repr(error))
    except asyncio.CancelledError:
        await lose("the event loop ends")
        raise


def _take(calls: deque[_Call], reply: Any) -> None:
    call = calls[0]
    call.replies.append(reply)
    if len(call.replies) == call.number:
        calls.popleft()
        call.end()


def _retrieved(opening: asyncio.Task[Any]) -> None:
    """Takes the error of a task, which was told to all who still wait."""
    if not opening.cancelled():
        opening.exception()
