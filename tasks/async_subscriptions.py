"""Pub/sub for asyncio: all subscribers of one event loop share one connection.

A worker publishes the deltas of all its streams together. With one connection a subscriber, each such flush would
wake the event loop once a subscriber, and a web app with many streams would exhaust Redis's connections.

One asyncio task reads the connection for as long as there are subscribers. Redis replies in order, so a reply
belongs to the oldest command without one. The queue of a subscriber is bounded: a slow one loses its oldest
messages, detects the gap and reads the log. When the connection is lost, all its subscribers are woken, and each
subscribes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import Any

import redis

from tasks import connections

MAX_BEHIND = 1024
"""Messages that are queued for one subscriber."""

_FAREWELL_S = 1.0


class Subscription:
    """One reader's subscription to a channel."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._line: _Line | None = None
        self._heard: deque[bytes] = deque(maxlen=MAX_BEHIND)
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Subscribe. Raises one of `connections.LOST`, or the error that Redis replied."""
        self._line = await _switchboard().line()
        await self._line.add(self._channel, self)

    async def get(self, patience_s: float) -> bytes | None:
        """The next delta; None if none arrives within `patience_s`. Raises redis.ConnectionError."""
        assert self._line is not None
        if not self._heard and self._line.lost is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        if not self._heard:
            raise self._line.error()
        return self._heard.popleft()

    async def hears(self) -> bool:
        """Whether messages published before this call have arrived and are still queued."""
        assert self._line is not None
        await self._line.ask(_FAREWELL_S, "PING")
        return bool(self._heard)

    async def close(self) -> None:
        if self._line is not None:
            with contextlib.suppress(*connections.LOST):
                await self._line.remove(self._channel, self)

    async def distrust(self) -> None:
        """Drop the shared connection: a message was missed, so its server may no longer be the one that workers
        publish to, and the other subscribers are affected too."""
        assert self._line is not None
        await self._line.lose("something was published and not heard")

    def hear(self, delta: bytes) -> None:
        self._heard.append(delta)
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()


class _Line:
    """A connection and its subscribers. `lost`: why the connection was given up; None while it is in use."""

    def __init__(self, pool: Any, connection: Any) -> None:
        self.lost: str | None = None
        self._pool, self._connection = pool, connection
        self._listeners: dict[bytes, set[Subscription]] = {}
        self._unanswered: deque[asyncio.Future[Exception | None]] = deque()
        self._listening: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self.lost is None and not self._connection.suspect

    def error(self) -> redis.ConnectionError:
        return redis.ConnectionError(f"a subscription's connection is lost: {self.lost}")

    async def add(self, channel: str, listener: Subscription) -> None:
        self._listeners.setdefault(channel.encode(), set()).add(listener)
        await self.ask(connections.REPLY_TIMEOUT_S, "SUBSCRIBE", channel)

    async def remove(self, channel: str, listener: Subscription) -> None:
        """Unsubscribe and wait for the reply: after the last one the connection has nothing to read, and the event
        loop may be closed."""
        listeners = self._listeners.get(channel.encode(), set())
        if listener in listeners:
            listeners.discard(listener)
            if not listeners:
                del self._listeners[channel.encode()]
                await self.ask(_FAREWELL_S, "UNSUBSCRIBE", channel)

    async def lose(self, why: str) -> None:
        """Release the connection; fail pending commands and wake all subscribers. Later calls have no effect."""
        if self.lost is not None:
            return
        self.lost = why
        for answer in self._unanswered:
            if not answer.done():
                answer.set_result(self.error())
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.wake()
        self._listeners.clear()
        await self._connection.disconnect(nowait=True)
        await self._pool.release(self._connection)

    async def ask(self, patience_s: float, *command: str) -> None:
        """Send a command and wait for its reply. Messages published before the reply are queued by then."""
        if self.lost is not None:
            raise self.error()
        answer: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._unanswered.append(answer)
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen())
        try:
            await self._connection.send_command(*command, check_health=False)  # it would read other replies
            async with asyncio.timeout(patience_s):
                error = await answer
        except Exception as cause:  # of any type, if the connection is closed while redis-py sends
            await self.lose(f"no answer to {command[0]}: {cause!r}")
            raise self.error() from cause
        except asyncio.CancelledError:
            if not self._connection.is_connected:  # redis-py has closed it, and would reconnect by itself
                await self.lose(f"{command[0]} was cut off")
            raise
        if error is not None:
            raise error

    async def _listen(self) -> None:
        try:
            while self._listeners or self._unanswered:
                await self._hear()
        except Exception as error:
            await self.lose(repr(error))
        except asyncio.CancelledError:
            await self.lose("the event loop ends")
            raise

    async def _hear(self) -> None:
        error = None
        try:
            message = await self._connection.read_response(
                timeout=math.inf, disconnect_on_error=False, push_request=True
            )
        except redis.ResponseError as refusal:
            error = refusal
        else:
            if message[0] == b"message":
                _, channel, delta = message
                for listener in self._listeners.get(channel, ()):
                    listener.hear(delta)
                return
        answer = self._unanswered.popleft()
        if not answer.done():
            answer.set_result(error)


class _Switchboard:
    """The shared connection of an event loop, opened on demand. Concurrent callers share one attempt."""

    _line: _Line | None = None
    _opening: asyncio.Task[_Line] | None = None

    async def line(self) -> _Line:
        if self._line is not None and self._line.usable:
            return self._line
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> _Line:
        try:
            if self._line is not None:
                await self._line.lose("its server has become a replica")
            pool = connections.async_streams().connection_pool
            self._line = _Line(pool, await pool.get_connection())  # type: ignore[no-untyped-call]
            return self._line
        finally:
            self._opening = None


_switchboard = connections.PerLoop(_Switchboard)
