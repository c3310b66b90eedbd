"""What the gateway's own Redis user may not do, although the gateway does it: docs/gateway.md#what-it-may-do.

Redis looks at a user's rights when it queues a command of a transaction. So all commands are queued, and the
transaction is dropped. A server without transactions would carry them out: it is asked for nothing. Where rights
have a pattern, the key is one that nobody uses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

import redis
from kombu.transport.redis import Channel

from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import (
    ADAPTERS_KEY,
    MODELS_KEY,
    WORKERS_KEY,
    batch_key,
    gateway_key,
    image_key,
    stream_keys,
    usage_keys,
)

KNOWN_FOR_S = 5.0
WAIT_S = 0.5
_SHA = "0" * 40
_RESULT = "celery-task-meta-nothing"
_FORMS: dict[str, tuple[Any, ...]] = {
    "set": ("",),
    "expire": (1,),
    "pexpire": (1,),
    "rpush": ("",),
    "lpush": ("",),
    "lrange": (0, 0),
    "hget": ("",),
    "hset": ("", ""),
    "hsetnx": ("", ""),
    "hdel": ("",),
    "hincrby": ("", 1),
    "zadd": (1, ""),
    "zrem": ("",),
    "zcount": (0, 0),
    "zrange": (0, 0),
    "zrevrange": (0, 0),
    "zrangebyscore": (0, 0),
    "zremrangebyscore": (0, 0),
    "zremrangebyrank": (0, 0),
    "sadd": ("",),
    "srem": ("",),
}
"""By command, what follows its key."""

OF_RECORDS = (
    "set get mget del exists expire watch rpush lrange llen hget hgetall hkeys hset hsetnx hdel hincrby zadd zrem "
    "zcard zcount zrange zrangebyscore zremrangebyscore zremrangebyrank"
)
OF_BATCHES = "get hget hgetall hset del exists set expire pexpire zadd zrange zrevrange zrem sadd srem smembers"
"""Commands that batches in files need."""


def needed() -> list[tuple[Any, ...]]:
    """A call of each command and key."""
    task, record = stream_keys("nothing"), gateway_key("/nothing")
    keys = [(OF_RECORDS, record), ("hgetall", usage_keys("nothing")[1]), ("watch hset hdel", ADAPTERS_KEY)]
    keys += [("hgetall", key) for key in (WORKERS_KEY, MODELS_KEY, ADAPTERS_KEY, task.state)]
    keys += [("lrange", task.log), ("hset expire", task.asked), ("set", task.interest), ("set", image_key("x"))]
    keys += [("llen", task.log), ("expire", image_key("x"))]
    if settings().gateway_files:
        keys.append((OF_BATCHES, batch_key("/nothing")))
    if settings().results_url == settings().streams_url:
        keys += [("get mget", _RESULT), ("subscribe", _RESULT)]
    if settings().broker_url == settings().streams_url:
        keys += [("lpush llen", name) for name in _lists()]
        keys.append(("sadd", f"_kombu.binding.{settings().queue}.nothing"))
    calls: list[tuple[Any, ...]] = [
        (name, key, *_FORMS.get(name, ())) for names, key in keys for name in names.split()
    ]
    calls += [("time",), ("unwatch",), ("subscribe", task.channel), ("script", "load", "")]
    calls += [("eval", "", 1, record), ("evalsha", _SHA, 1, record)]
    if settings().broker_url == settings().streams_url and settings().confirm_replicas:
        calls.append(("wait", 0, 1))
    return calls


def _lists() -> list[str]:
    """Redis's names of the default queue, by priority, and of one for a tenant or a model."""
    queue = settings().queue
    others = [f"{queue}{Channel.sep}{priority}" for priority in Channel.priority_steps if priority]
    return [queue, *others, f"{queue}.nothing"]


class DeniedCommands:
    """What an event loop knows of them. A task of its own looks, because a connection may not be free for long."""

    def __init__(self) -> None:
        self._known: Sequence[str] = ()
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> Sequence[str]:
        """The commands, with their keys, as last known. After `KNOWN_FOR_S` it waits `WAIT_S` for news."""
        if self._looking is None and time.monotonic() - self._looked_at > KNOWN_FOR_S:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=WAIT_S)
        return self._known

    async def _look(self) -> None:
        try:
            with contextlib.suppress(TimeoutError, redis.RedisError, OSError):
                async with asyncio.timeout(connections.REPLY_TIMEOUT_S):
                    self._known = await _look(needed())
                    self._looked_at = time.monotonic()
        finally:
            self._looking = None


denied_commands = connections.PerLoop(DeniedCommands)
"""The running event loop's."""


async def _look(calls: Sequence[Sequence[Any]]) -> list[str]:
    pool: Any = connections.async_streams().connection_pool
    connection = await pool.get_connection()
    try:
        await connection.send_packed_command(connection.pack_commands([("multi",), ("ping",)]))
        begun, queued = [await _reply(connection) for _ in range(2)]
        if (begun, queued) != (b"OK", b"QUEUED"):  # the others would be carried out
            return ["multi"]
        await connection.send_packed_command(connection.pack_commands(calls))
        replies = [await _reply(connection) for _ in calls]
    finally:
        await connection.disconnect()
        await pool.release(connection)
    denied = [isinstance(reply, redis.exceptions.NoPermissionError) for reply in replies]
    return [" ".join(map(str, call[:2])) for call in compress(calls, denied)]


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except redis.ResponseError as error:
        return error
