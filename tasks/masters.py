"""Pools whose connections lead to a master, also after a failover that leaves the old one alive.

A master that is demoted keeps its connections. It refuses writes and answers reads with what it had, so who only
reads would never learn of it. Here a connection whose write is refused is made anew, which leads to the new
master; and every few seconds, before one is handed out, it proves by a write that changes nothing that it may be
read from.
"""

from __future__ import annotations

import time
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

PROOF_S = 2.0
"""How long a proof is good for."""

_PROOF = ("EXPIRE", "petiole:nothing", 1)


def demoted(error: ResponseError) -> bool:
    """Whether a server says with it that it is a replica. Redis 6 wraps what a script was told."""
    return isinstance(error, ReadOnlyError) or "-READONLY " in str(error)


def refuses_writes(error: ResponseError) -> bool:
    """Whether a server says with it that it takes no writes at the moment, from nobody."""
    codes = ("OOM ", "NOREPLICAS ", "MISCONF ")
    return isinstance(error, OutOfMemoryError) or demoted(error) or any(code in str(error) for code in codes)


class _Proving:
    """What a connection knows of its server, until it is made anew. Each pool has a subclass of its own."""

    proven_at = lost_at = float("-inf")

    @property
    def proven(self) -> bool:
        return not self.suspect and self.proven_at > time.monotonic() - PROOF_S

    @property
    def suspect(self) -> bool:
        """Has another connection of the pool met a replica since this one was proven?"""
        return self.proven_at <= self.lost_at

    def lose_master(self) -> None:
        type(self).lost_at = time.monotonic()

    def disconnect(self, *args: Any, **options: Any) -> Any:
        self.proven_at = float("-inf")
        connection: Any = super()
        return connection.disconnect(*args, **options)


class _Connection(_Proving):
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


class _AsyncConnection(_Proving):
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


class MasterPool(redis.ConnectionPool):
    def __init__(self, connection_class: type = redis.Connection, **options: Any) -> None:
        super().__init__(connection_class=type("Connection", (_Connection, connection_class), {}), **options)

    def get_connection(self, *args: Any, **options: Any) -> Any:
        connection: Any = super().get_connection(*args, **options)
        try:
            if not connection.proven:
                try:
                    self._prove(connection)
                except redis.ConnectionError:  # the address may lead to another server by now
                    connection.disconnect()
                    connection.connect()
                    self._prove(connection)
        except BaseException:
            self.release(connection)
            raise
        return connection

    def _prove(self, connection: Any) -> None:
        try:
            connection.send_command(*_PROOF)
            connection.read_response()
        except ResponseError:  # this user may not write here: there is no telling
            pass
        connection.proven_at = time.monotonic()


class AsyncMasterPool(redis.asyncio.BlockingConnectionPool):
    """`MasterPool` for asyncio. When `max_connections` are in use, the next waits for one."""

    def __init__(self, connection_class: type = redis.asyncio.Connection, **options: Any) -> None:
        super().__init__(connection_class=type("Connection", (_AsyncConnection, connection_class), {}), **options)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        connection: Any = await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]
        try:
            if not connection.proven:
                try:
                    await self._prove(connection)
                except redis.ConnectionError:
                    await connection.disconnect()
                    await connection.connect()
                    await self._prove(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def _prove(self, connection: Any) -> None:
        try:
            await connection.send_command(*_PROOF)
            await connection.read_response()
        except ResponseError:
            pass
        connection.proven_at = time.monotonic()
