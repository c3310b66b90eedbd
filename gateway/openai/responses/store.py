"""What is kept beside the records: values as JSON, lists that only grow, and names by when they were used. All of
it expires, and a tenant finds its own.

A list is an append-only log like a task's. Two gateways that append at once do not overwrite each other: whoever
appends says how many entries it has seen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import redis

from petiole import json_text
from petiole.gateway.core.caller import caller
from petiole.gateway.serving.retry import patiently
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import gateway_key


def _key(name: str) -> str:
    return gateway_key(caller().place_of(name))


async def put(name: str, value: Any, keep_s: int) -> None:
    raw = msgspec.json.encode(value)
    await patiently(lambda: connections.async_streams().set(_key(name), raw, ex=keep_s))


async def get(*names: str) -> list[Any]:
    """The values; None for one that is not there, or cannot be read."""
    if not names:
        return []
    found = await patiently(lambda: connections.async_streams().mget([_key(name) for name in names]))
    return [_decoded(raw) for raw in found]


def _decoded(raw: object) -> Any:
    try:
        return json_text.decode(raw) if isinstance(raw, bytes) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _text(entry: bytes | str) -> str:
    return entry.decode() if isinstance(entry, bytes) else entry


async def forget(*names: str) -> None:
    await patiently(lambda: connections.async_streams().delete(*map(_key, names)))


async def keep(longer: Mapping[str, int]) -> None:
    """Let each of these names expire after this many seconds from now."""

    async def renewed() -> None:
        async with connections.async_streams().pipeline(transaction=False) as pipe:
            for name, keep_s in longer.items():
                pipe.expire(_key(name), keep_s)
            await pipe.execute()

    if longer:
        await patiently(renewed)


async def used(name: str, member: str, keep_s: int, most: int, *, new: bool) -> None:
    """Note that this member is used now: of the `most` that were used last, and for `keep_s`. Unless it is `new`
    it must be there."""
    key, now = _key(name), time.time()

    async def noted() -> None:
        async with connections.async_streams().pipeline(transaction=True) as pipe:
            pipe.zadd(key, {member: now}, xx=not new)
            pipe.zremrangebyscore(key, "-inf", now - keep_s)
            pipe.zremrangebyrank(key, 0, -most - 1)
            pipe.expire(key, keep_s)
            await pipe.execute()

    await patiently(noted)


async def last_used(name: str) -> list[str]:
    """The members, the one that was used first first."""
    found = await patiently(lambda: connections.async_streams().zrange(_key(name), 0, -1))
    return [_text(cast("bytes | str", member)) for member in found]


async def entries(name: str) -> list[str]:
    found = await patiently(lambda: connections.async_streams().lrange(_key(name), 0, -1))
    return [_text(entry) for entry in found]


async def append(name: str, new: Sequence[str], seen: int, keep_s: int) -> bool:
    """Append these entries after the `seen` ones. False if there are others after them."""
    key = _key(name)

    async def appended() -> bool:
        async with connections.async_streams().pipeline(transaction=True) as pipe:
            await pipe.watch(key)
            behind = [_text(entry) for entry in await pipe.lrange(key, seen, -1)]
            if behind or await pipe.llen(key) != seen:
                return behind == [*new]  # an earlier try may have done it, and lost its answer
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.rpush(key, *new)
            pipe.expire(key, keep_s)
            try:
                await pipe.execute()
            except redis.WatchError:
                return False
            return True

    return await patiently(appended)
