"""One pool of Redis connections for each process, made at the first use and made anew after a fork.

The clients do not retry: whoever uses them knows what a lost connection means, and some must read a log again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit
from weakref import WeakKeyDictionary

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError
from redis.retry import Retry

from tasks.settings import EMBEDDED, scheme, settings, verified

if TYPE_CHECKING:
    from redis.asyncio import Redis as AsyncRedis

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0
LOST = (redis.ConnectionError, redis.TimeoutError, OSError)

_OPTIONS: dict[str, Any] = {
    "protocol": 2,  # under 3 redis-py writes a log line for each message of a subscription, shown or not
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "socket_timeout": REPLY_TIMEOUT_S,
    "max_connections": 2**31,  # each reader holds one; redis-py 8 would refuse the hundred-and-first
}


def redis_url(url: str) -> str:
    """`url` as redis-py understands it: Celery's `redis+socket://` is `unix://`."""
    if scheme(url) == EMBEDDED:
        from tasks import embedded

        return f"unix://{embedded.socket_path()}?db=0"
    if scheme(url) == "redis+socket":
        parts = urlsplit(url)
        db = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/")
        return f"unix://{parts.netloc}{parts.path}?db={db or 0}"
    return verified(url)


def connect(url: str) -> redis.Redis:
    """A client with a pool of its own."""
    client: redis.Redis = redis.Redis.from_url(redis_url(url), retry=Retry(NoBackoff(), 0), **_OPTIONS)
    leave_replicas(client.connection_pool)
    return client


class _LeavesReplicas:
    """A connection whose server became a replica has lost its master: the address leads to another one now."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **options)
        except ReadOnlyError as error:
            connection.disconnect()
            raise redis.ConnectionError(str(error)) from error


def leave_replicas(pool: Any) -> None:
    """From now on the connections of `pool` are made anew when a write is refused because of a failover."""
    pool.connection_class = type("Connection", (_LeavesReplicas, pool.connection_class), {})


def streams() -> redis.Redis:
    """This process's client for streams, state and the fleet view."""
    return _streams(settings().streams_url, os.getpid())


@lru_cache(maxsize=8)
def _streams(url: str, pid: int) -> redis.Redis:
    return connect(url)


def async_streams() -> AsyncRedis:
    """The running event loop's client for the same."""
    loop = asyncio.get_running_loop()
    if loop not in _clients_of_loops:
        from redis.asyncio import Redis as AsyncRedis
        from redis.asyncio.retry import Retry as AsyncRetry

        make: Callable[..., AsyncRedis] = AsyncRedis.from_url
        url = redis_url(settings().streams_url)
        _clients_of_loops[loop] = make(url, retry=AsyncRetry(NoBackoff(), 0), **_OPTIONS)
    return _clients_of_loops[loop]


_clients_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncRedis] = WeakKeyDictionary()
