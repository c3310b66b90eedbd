"""Redis connection pools: one for each process, created at its first use and again after a fork, and one for each
event loop.

The clients do not retry: callers handle a lost connection themselves, some by reading the log again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from petiole.contract.settings.urls import EMBEDDED, SENTINEL, SentinelUrl, scheme, verified
from petiole.tasks.servers import redis_py
from petiole.tasks.servers.failover import AsyncMasterPool, MasterPool
from petiole.tasks.servers.sentinels import ASYNC, SYNC, options_for, pool_parameters
from petiole.tasks.servers.shared import Commands as Commands, SharedConnection
from petiole.tasks.settings import settings

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0
LOST = (redis.ConnectionError, redis.TimeoutError, OSError)

_OPTIONS: dict[str, Any] = {
    **redis_py.RESP2,
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "socket_timeout": REPLY_TIMEOUT_S,
}


def redis_url(url: str) -> str:
    """`url` in redis-py's form: Celery's `redis+socket://` becomes `unix://`."""
    if scheme(url) == EMBEDDED:
        from petiole.tasks.servers import embedded

        return f"unix://{embedded.socket_path()}?db=0"
    if scheme(url) == "redis+socket":
        parts = urlsplit(url)
        db = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/")
        return f"unix://{parts.netloc}{parts.path}?db={db or 0}"
    return verified(url)


def connect(url: str) -> redis.Redis:
    """A client with its own connection pool."""
    pool = _pool(MasterPool, SYNC, url, retry=Retry(NoBackoff(), 0), **_OPTIONS)
    return redis_py.owner(redis.Redis(connection_pool=pool))


def _pool(kind: Any, classes: tuple[type, type], url: str, **options: Any) -> Any:
    if scheme(url) == SENTINEL:
        master = pool_parameters(SentinelUrl.parse(url), options_for(settings(), url), classes)
        return kind(**master, **options)
    return kind.from_url(redis_url(url), **options)


def streams() -> redis.Redis:
    """This process's client for streams, state and the fleet view."""
    return _streams(settings().streams_url, os.getpid())


@lru_cache(maxsize=8)
def _streams(url: str, pid: int) -> redis.Redis:
    return connect(url)


T = TypeVar("T")


class PerLoop(Generic[T]):
    """One object for each event loop. The objects refer to their loop, so weak keys would keep them for ever.
    Objects of closed loops are dropped when a new loop gets one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of: dict[asyncio.AbstractEventLoop, T] = {}

    def __call__(self) -> T:
        """The running loop's object."""
        loop = asyncio.get_running_loop()
        if loop not in self._of:
            for other in list(self._of):
                if other.is_closed():
                    self._of.pop(other, None)
            self._of[loop] = self._make()
        return self._of[loop]


class AsyncClient(AsyncRedis):
    """A client whose commands, but for pipelines and subscriptions, go over one connection for all callers."""

    def __init__(self, pool: Any) -> None:
        super().__init__(connection_pool=pool)
        self.shared = SharedConnection(pool, REPLY_TIMEOUT_S)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        [reply] = await self.shared.send([args])
        return await self.parse_response(_Replied(reply), args[0], **options)  # type: ignore[arg-type]


class _Replied:
    """Stands in for a connection where redis-py reads a reply that has come."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    async def read_response(self, **_: object) -> Any:
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply


def _async_client(url: str) -> AsyncClient:
    options = {**_OPTIONS, "max_connections": settings().stream_connections, "retry": AsyncRetry(NoBackoff(), 0)}
    return redis_py.owner(AsyncClient(_pool(AsyncMasterPool, ASYNC, url, **options)))


async_streams = PerLoop(lambda: _async_client(settings().streams_url))
"""The running event loop's asyncio client for the Redis of `streams`."""
_async_broker = PerLoop(lambda: _async_client(settings().broker_url))


def async_broker() -> AsyncClient:
    """The running event loop's asyncio client for a broker that is a Redis: mostly that of `streams`."""
    shared = settings().streams_url == settings().broker_url
    return async_streams() if shared else _async_broker()


def perform(commands: Commands, *, raises: bool = True) -> list[Any]:
    """The answers of the Redis of `streams`, in one round trip. `raises`: an error among them is raised."""
    with streams().pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        return pipe.execute(raise_on_error=raises)


async def aperform(commands: Commands, *, raises: bool = True) -> list[Any]:
    """`perform` for asyncio."""
    client, answers = async_streams(), list[Any]()
    for command, reply in zip(commands, await client.shared.send(commands) if commands else (), strict=True):
        if isinstance(reply, Exception):
            if raises:
                raise reply
        elif (callback := client.response_callbacks.get(command[0])) is not None:
            reply = callback(reply)
        answers.append(reply)
    return answers
