"""Subscriptions that outlive their readers: making one costs a connection, handing one on a round trip.

What is published while a subscription is confirmed is dropped: it stands in the log, which is read next.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import redis

from tasks import connections

if TYPE_CHECKING:
    from redis.asyncio.client import PubSub as AsyncPubSub
    from redis.client import PubSub

MAX_IDLE = 64
_POLL_S = 1.0
_FAREWELL_S = 1.0

_idle: list[tuple[int, PubSub]] = []
_idle_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncPubSub]] = WeakKeyDictionary()


def subscribe(channel: str) -> PubSub:
    pubsub = _take_idle() or connections.streams().pubsub()  # type: ignore[no-untyped-call]
    try:
        pubsub.subscribe(channel)
        _confirmed(pubsub, "subscribe", channel, connections.REPLY_TIMEOUT_S)
    except BaseException:
        pubsub.close()
        raise
    return pubsub


def unsubscribe(pubsub: PubSub, channel: str) -> None:
    """Keep it for the next reader."""
    try:
        if len(_idle) < MAX_IDLE:
            pubsub.unsubscribe(channel)  # type: ignore[no-untyped-call]
            _confirmed(pubsub, "unsubscribe", channel, _FAREWELL_S)
            _idle.append((os.getpid(), pubsub))
            return
    except connections.LOST:
        pass
    pubsub.close()


def _take_idle() -> PubSub | None:
    """One of this process (a forked child has its parent's list), and of the Redis that is now set."""
    while _idle:
        pid, pubsub = _idle.pop()
        if pid == os.getpid() and pubsub.connection_pool is connections.streams().connection_pool:
            return pubsub
    return None


def _confirmed(pubsub: PubSub, kind: str, channel: str, patience_s: float) -> None:
    give_up_at = time.monotonic() + patience_s
    while not _is(pubsub.get_message(timeout=min(_POLL_S, patience_s)), kind, channel):
        if time.monotonic() > give_up_at:
            raise redis.TimeoutError(f"no answer to {kind}")


async def subscribe_async(channel: str) -> AsyncPubSub:
    idle = _idle_of_loop()
    pubsub = idle.pop() if idle else connections.async_streams().pubsub()
    try:
        await pubsub.subscribe(channel)
        await _confirmed_async(pubsub, "subscribe", channel, connections.REPLY_TIMEOUT_S)
    except BaseException:
        await pubsub.aclose()  # type: ignore[no-untyped-call]
        raise
    return pubsub


async def unsubscribe_async(pubsub: AsyncPubSub, channel: str) -> None:
    """Keep it for the event loop's next reader."""
    kept = False
    try:
        if len(_idle_of_loop()) < MAX_IDLE:
            await pubsub.unsubscribe(channel)
            await _confirmed_async(pubsub, "unsubscribe", channel, _FAREWELL_S)
            _idle_of_loop().append(pubsub)
            kept = True
    except connections.LOST:
        pass
    finally:
        if not kept:
            await pubsub.aclose()  # type: ignore[no-untyped-call]


def _idle_of_loop() -> list[AsyncPubSub]:
    return _idle_of_loops.setdefault(asyncio.get_running_loop(), [])


async def _confirmed_async(pubsub: AsyncPubSub, kind: str, channel: str, patience_s: float) -> None:
    async with asyncio.timeout(patience_s):
        while not _is(await pubsub.get_message(timeout=min(_POLL_S, patience_s)), kind, channel):
            pass


def data(message: dict[str, Any] | None) -> bytes | None:
    """What was published, or None for silence and for the answers to commands."""
    return message["data"] if message is not None and message["type"] == "message" else None


def _is(message: dict[str, Any] | None, kind: str, channel: str) -> bool:
    return message is not None and message["type"] == kind and message["channel"] == channel.encode()
