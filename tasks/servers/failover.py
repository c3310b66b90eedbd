"""Connection pools that follow the master after a failover, also if the old master stays up.

A demoted master keeps its connections. It refuses writes but answers reads with stale data, so a client that only
reads would not notice. Here a connection whose write is refused is closed; reconnecting leads to the new
master. A connection that was not checked within `CHECK_S` is checked before the pool returns it, by a write that
changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ReadOnlyError, ResponseError

from petiole.tasks.servers import redis_py
from petiole.tasks.servers.replies import Answers, AsyncAnswers, is_damage, named
from petiole.tasks.wire.keys import PROBE_KEY

CHECK_S = 2.0
"""How long a check is valid."""

CHECK = ("EXPIRE", PROBE_KEY, 1)
"""A write that changes nothing."""

SOON_WRITTEN = 2**16
"""Bytes that may wait in a transport before a sender waits for it."""


def demoted(error: Exception) -> bool:
    """Whether `error` says that the server is a replica. An error in a script may come as text."""
    return isinstance(error, ReadOnlyError) or "READONLY " in str(error)


def refuses_writes(error: Exception) -> bool:
    """Whether `error` says that the server currently refuses all writes."""
    codes = ("OOM ", "NOREPLICAS ", "MISCONF ")
    return isinstance(error, redis_py.OutOfMemory) or demoted(error) or any(code in str(error) for code in codes)


@contextlib.contextmanager
def refusals_are_losses() -> Iterator[None]:
    """For callers that wait for a server that is away: raises `redis.ConnectionError` for one that refuses all
    writes, too."""
    try:
        yield
    except ResponseError as error:
        if not refuses_writes(error):
            raise
        raise redis.ConnectionError(str(error)) from error


def caused_by_call(error: BaseException) -> bool:
    """Whether Redis refuses this call now and later: its arguments, its keys or its script are wrong."""
    if isinstance(error, redis.DataError) or is_damage(error):
        return True
    if not isinstance(error, ResponseError) or "user_script" not in str(error):
        return False
    return not refuses_writes(error) and "NOPERM" not in str(error) and "ACL " not in str(error)


class _CheckedConnection:
    """When the server was last known to be a master. `lost_at` is a class attribute: each pool has a subclass."""

    checked_at = lost_at = float("-inf")

    @property
    def checked(self) -> bool:
        return not self.suspect and self.checked_at > time.monotonic() - CHECK_S

    @property
    def suspect(self) -> bool:
        """Whether a connection of the pool has met a replica since this one was checked."""
        return self.checked_at <= self.lost_at

    @property
    def was_checked(self) -> bool:
        return self.checked_at > float("-inf")

    def lose_master(self) -> None:
        type(self).lost_at = time.monotonic()

    def disconnect(self, *args: Any, **options: Any) -> Any:
        self.checked_at = float("-inf")
        connection: Any = super()
        return connection.disconnect(*args, **options)


class _Connection(_CheckedConnection, Answers):
    def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **options)
        except ResponseError as error:
            if not demoted(error):
                raise
            self.lose_master()
            self.disconnect()
            raise redis.ConnectionError(str(error)) from error


class _AsyncConnection(_CheckedConnection, AsyncAnswers):
    replies_elsewhere = False
    """Another task than the sender's reads the replies, so that a sender who leaves may leave one behind."""

    is_connected: bool  # redis-py's
    health_check_interval: float
    _reader: Any
    _writer: Any

    @property
    def has_ended(self) -> bool:
        """Whether the server has closed it."""
        return bool(self._reader.at_eof() or self._writer.transport.is_closing())

    def pack_command(self, *words: Any) -> list[bytes]:
        connection: Any = super()
        return _packed([words]) or list(connection.pack_command(*words))

    def pack_commands(self, commands: Iterable[Sequence[Any]]) -> list[bytes]:
        connection: Any = super()
        commands = list(commands)
        return _packed(commands) or list(connection.pack_commands(commands))

    def write(self, packed: list[bytes]) -> None:
        """Write to a connection that is open, without waiting until the server takes it."""
        self._writer.writelines(packed)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """redis-py sends with `asyncio.wait_for`, which makes an asyncio task and a timer for each write, although
        nearly every write is done at once. Before Python 3.12 that also loses a cancellation that comes when all
        is sent, and the sender would go on as if nobody had cancelled it."""
        alive = self.is_connected and not (check_health and self.health_check_interval) and not self.has_ended
        if alive and isinstance(command, list):
            self.write(command)
            if self._writer.transport.get_write_buffer_size() < SOON_WRITTEN:
                return
            command = []  # redis-py waits
        connection: Any = super()
        task = asyncio.current_task()
        cancelled = 0 if task is None else task.cancelling()
        await connection.send_packed_command(command, check_health=check_health)
        if task is not None and task.cancelling() > cancelled:
            if not self.replies_elsewhere:
                await self.disconnect(nowait=True)
            raise asyncio.CancelledError

    async def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return await connection.read_response(*args, **options)
        except ResponseError as error:
            if not demoted(error):
                raise
            self.lose_master()
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(str(error)) from error

    def read_along(self) -> Iterator[Any]:
        """The replies that have come together with the last one that `read_response` has returned. Those that it
        would raise for the whole connection are raised."""
        for reply in redis_py.read_along(self):
            if not isinstance(reply, Exception):
                yield reply
            elif not isinstance(reply, ResponseError):
                raise reply
            elif demoted(reply):
                self.lose_master()
                raise redis.ConnectionError(str(reply))
            else:
                yield named(reply)


def _packed(commands: Sequence[Sequence[Any]]) -> list[bytes]:
    """Commands of text, bytes and integers, as they are sent; nothing if they have words of other types. redis-py
    looks at each word several times."""
    parts = list[bytes]()
    for command in commands:
        if type(command[0]) is not str or " " in command[0]:
            return []
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            kind = type(word)
            if kind is not bytes and kind is not str and kind is not int:
                return []
            sent = word if kind is bytes else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(sent), sent))
    return [b"".join(parts)]


class MasterPool(redis.ConnectionPool):
    """A pool without a limit by default. (redis-py 8 limits a pool to 100 connections, and raises above that.)"""

    def __init__(
        self, connection_class: type = redis.Connection, max_connections: int | None = None, **options: Any
    ) -> None:
        checked = type("Connection", (_Connection, connection_class), {})
        super().__init__(connection_class=checked, max_connections=max_connections or 2**31, **options)

    def get_connection(self, *args: Any, **options: Any) -> Any:
        connection: Any = super().get_connection(*(args or redis_py.COMMAND), **options)
        try:
            if not connection.checked:
                try:
                    self._check(connection)
                except redis.ConnectionError:  # the address may resolve to another server by now
                    connection.disconnect()
                    connection.connect()
                    self._check(connection)
        except BaseException:
            self.release(connection)
            raise
        return connection

    def _check(self, connection: Any) -> None:
        try:
            connection.send_command(*CHECK)
            connection.read_response()
        except ResponseError:  # this user has no permission to write: cannot be checked
            pass
        connection.checked_at = time.monotonic()


class AsyncMasterPool(redis.asyncio.BlockingConnectionPool):
    """`MasterPool` for asyncio. While all `max_connections` are in use, callers wait."""

    def __init__(self, connection_class: type = redis.asyncio.Connection, **options: Any) -> None:
        super().__init__(connection_class=type("Connection", (_AsyncConnection, connection_class), {}), **options)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        try:
            connection: Any = await super().get_connection(*(args or redis_py.COMMAND), **options)  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            await self._pass_on()
            raise
        try:
            if not connection.checked:
                try:
                    await self._check(connection)
                except redis.ConnectionError:
                    await connection.disconnect()
                    await connection.connect()
                    await self._check(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def _pass_on(self) -> None:
        """Before Python 3.13, a caller that is cancelled when its turn has come takes the turn with it, and those
        behind it would wait although connections are free."""
        condition = getattr(self, "_condition", None)  # old versions of redis-py have a queue
        if condition is not None:
            async with condition:
                condition.notify()

    async def _check(self, connection: Any) -> None:
        try:
            await connection.send_command(*CHECK)
            await connection.read_response()
        except ResponseError:
            pass
        connection.checked_at = time.monotonic()
