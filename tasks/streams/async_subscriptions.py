"""Pub/sub for asyncio: all subscribers of one event loop share one connection.

A worker publishes the deltas of all its streams together. If each subscriber had a connection, each such flush
would wake the event loop once for each subscriber, and a web app with many streams would exhaust Redis's
connections.

One asyncio task reads the connection while there are subscribers. Redis replies in order, so a reply
belongs to the oldest command without one. A subscriber takes messages from a queue (`get`), or is called with each
of them (`listen`), which wakes no asyncio task. The queue is bounded: a slow subscriber loses its oldest messages,
detects the gap and reads the log. When the connection is lost, all its subscribers are woken, and each subscribes
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import redis

from petiole.tasks.servers import connections
from petiole.tasks.servers.shared import read_while
from petiole.tasks.streams.protocol import LEAST_S

MAX_BEHIND = 1024
"""Messages that are queued for one subscriber."""

_REPLY_S = 1.0
_LEAVES_WITHIN_S = 0.5


class Subscription:
    """One reader's subscription to a channel."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._shared: _SharedConnection | None = None
        self._messages: deque[bytes] = deque(maxlen=MAX_BEHIND)
        self._waiting: asyncio.Future[None] | None = None
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._hear: Callable[[bytes], bool] | None = None

    async def open(self) -> None:
        """Subscribe. Raises one of `connections.LOST`, or the error that Redis replied."""
        self._shared = await _shared_connections().get()
        await self._shared.add(self._channel, self)

    async def get(self, timeout_s: float) -> bytes | None:
        """The next delta; None if none arrives within `timeout_s`. Raises redis.ConnectionError."""
        assert self._shared is not None
        if not self._messages and self._shared.lost is None:
            await self._change(timeout_s)
        if self._messages:
            return self._messages.popleft()
        if self._shared.lost is not None:
            raise self._shared.error()
        return None

    async def listen(self, left_s: Callable[[], float], hear: Callable[[bytes], bool]) -> bool:
        """Call `hear` with each delta when it arrives. `hear` raises nothing, and returns whether to go on.
        `left_s`: for how long to wait for the next one. Returns False if the time is over. Raises
        redis.ConnectionError."""
        assert self._shared is not None
        while self._messages:
            if not hear(self._messages.popleft()):
                return True
        self._hear = hear
        try:
            while self._shared.lost is None:
                await self._change(left_s())
                if self._hear is None:
                    return True
                if left_s() <= 0 and self._shared.lost is None:
                    return False
        finally:
            self._hear = None
        raise self._shared.error()

    async def unless_heard(self, look: asyncio.Future[bool]) -> bool:
        """What the look says; True as soon as a message comes, which tells by its number what was missed."""
        assert self._shared is not None
        if not self._messages and self._shared.lost is None:
            self._waiting = asyncio.get_running_loop().create_future()
            look.add_done_callback(self._looked)
            try:
                await self._waiting
            finally:
                look.remove_done_callback(self._looked)  # it would end a later wait, as if nothing had come
                self._waiting = None
        return bool(self._messages) or (look.done() and look.result())

    def _looked(self, _: asyncio.Future[bool]) -> None:
        self.wake()

    async def _change(self, timeout_s: float) -> None:
        """Wait until `wake`, or for this long. Mostly the timer of an earlier wait is early enough: to set one for
        each message would cost more than to read the message."""
        loop = asyncio.get_running_loop()
        self._waiting, self._until = loop.create_future(), loop.time() + max(LEAST_S, timeout_s)
        if self._timer is not None and self._timer.when() > self._until:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_at(self._until, self._due)
        try:
            await self._waiting
        finally:
            self._waiting, self._until = None, math.inf

    def _due(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        if self._until <= loop.time():
            self.wake()
        elif self._until < math.inf:
            self._timer = loop.call_at(self._until, self._due)

    async def hears(self) -> bool:
        """Whether messages published before this call have arrived and are still queued."""
        assert self._shared is not None
        await self._shared.execute(_REPLY_S, "PING")
        return bool(self._messages)

    async def close(self) -> None:
        self._drop_timer()
        if self._shared is not None:
            with contextlib.suppress(*connections.LOST):
                await self._shared.remove(self._channel, self)

    def leave(self) -> None:
        """`close` without waiting for Redis. Mostly the next subscriber sends the command."""
        self._drop_timer()
        if self._shared is not None:
            self._shared.leave(self._channel, self)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def distrust(self) -> None:
        """Drop the shared connection after a missed message: workers may publish to another server now."""
        assert self._shared is not None
        await self._shared.lose("a published message was missed")

    def deliver(self, delta: bytes) -> None:
        if self._hear is None:
            self._messages.append(delta)
            self.wake()
        elif not self._hear(delta):
            self._hear = None
            self.wake()

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _SharedConnection:
    """A connection and its subscribers. `lost`: why it was given up, or None."""

    def __init__(self, pool: Any, connection: Any) -> None:
        self.lost: str | None = None
        self._pool, self._connection = pool, connection
        connection.replies_elsewhere = True
        self._subscribers: dict[bytes, set[Subscription]] = {}
        self._pending: deque[asyncio.Future[Exception | None]] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._left: list[str] = []  # channels that Redis still has to be told of
        self._leaving: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self.lost is None and not self._connection.suspect

    def error(self) -> redis.ConnectionError:
        return redis.ConnectionError(f"a subscription's connection is lost: {self.lost}")

    async def add(self, channel: str, subscriber: Subscription) -> None:
        self._subscribers.setdefault(channel.encode(), set()).add(subscriber)
        await self.execute(connections.REPLY_TIMEOUT_S, "SUBSCRIBE", channel)

    async def remove(self, channel: str, subscriber: Subscription) -> None:
        """Unsubscribe and wait for the reply, because the event loop may be closed after the last one."""
        if self._was_last(channel, subscriber):
            await self.execute(_REPLY_S, "UNSUBSCRIBE", channel)

    def leave(self, channel: str, subscriber: Subscription) -> None:
        """Unsubscribe with the next command, or soon."""
        if self._was_last(channel, subscriber):
            self._left.append(channel)
            if self._leaving is None:
                self._leaving = asyncio.get_running_loop().call_later(_LEAVES_WITHIN_S, self._leave)

    def _was_last(self, channel: str, subscriber: Subscription) -> bool:
        """Forget this subscriber. Returns whether it was the last one of the channel."""
        subscribers = self._subscribers.get(channel.encode(), set())
        if subscriber not in subscribers:
            return False
        subscribers.discard(subscriber)
        if subscribers:
            return False
        del self._subscribers[channel.encode()]
        return True

    def _leave(self) -> None:
        self._leaving = None
        if self._left and self.lost is None and self._connection.is_connected and not self._connection.has_ended:
            self._connection.write(self._connection.pack_commands(self._farewells()))
            self._read()

    def _farewells(self) -> list[tuple[str, str]]:
        """The commands for the channels that were left. Nobody waits for their replies."""
        nobody: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        nobody.set_result(None)
        channels, self._left = self._left, []
        self._pending.extend([nobody] * len(channels))
        return [("UNSUBSCRIBE", channel) for channel in channels]

    def _read(self) -> None:
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(read_while(self._is_due, self._connection, self._take, self.lose))

    def _is_due(self) -> bool:
        return bool(self._subscribers or self._pending)

    async def lose(self, why: str) -> None:
        """Release the connection, once; fail pending commands and wake all subscribers."""
        if self.lost is not None:
            return
        self.lost = why
        for reply in self._pending:
            if not reply.done():
                reply.set_result(self.error())
        for subscribers in self._subscribers.values():
            for subscriber in subscribers:
                subscriber.wake()
        self._subscribers.clear()
        self._left.clear()
        await self._connection.disconnect(nowait=True)
        self._connection.replies_elsewhere = False
        await self._pool.release(self._connection)

    async def execute(self, timeout_s: float, *command: str) -> None:
        """Send a command and wait for its reply. Messages published before the reply are queued by then."""
        if self.lost is not None:
            raise self.error()
        reply: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        packed = self._connection.pack_commands([*self._farewells(), command])
        self._pending.append(reply)
        self._read()
        try:
            await self._connection.send_packed_command(
                packed, check_health=False
            )  # this connection would read replies to other commands
            async with asyncio.timeout(timeout_s):
                error = await reply
        except Exception as cause:  # of any type, if the connection is closed while redis-py sends
            await self.lose(f"no answer to {command[0]}: {cause!r}")
            raise self.error() from cause
        except asyncio.CancelledError:
            if not self._connection.is_connected:  # redis-py has closed it, and would reconnect by itself
                await self.lose(f"{command[0]} was cut off")
            raise
        if error is not None:
            raise error

    def _take(self, answer: Any) -> None:
        """A published message, or the reply to the oldest command without one."""
        if isinstance(answer, list) and answer[0] == b"message":
            _, channel, delta = answer
            for subscriber in self._subscribers.get(channel, ()):
                subscriber.deliver(delta)
            return
        reply = self._pending.popleft()
        if not reply.done():
            reply.set_result(answer if isinstance(answer, Exception) else None)


class _SharedConnections:
    """The shared connection of an event loop, opened on demand. Concurrent callers share one attempt."""

    _current: _SharedConnection | None = None
    _opening: asyncio.Task[_SharedConnection] | None = None

    async def get(self) -> _SharedConnection:
        if self._current is not None and self._current.usable:
            return self._current
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> _SharedConnection:
        try:
            if self._current is not None:
                await self._current.lose("its server has become a replica")
            pool = connections.async_streams().connection_pool
            self._current = _SharedConnection(pool, await pool.get_connection())  # type: ignore[no-untyped-call]
            return self._current
        finally:
            self._opening = None


_shared_connections = connections.PerLoop(_SharedConnections)


async def connect() -> None:
    """From now on a subscription is written as soon as it is asked for. Raises one of `connections.LOST`."""
    await _shared_connections().get()
