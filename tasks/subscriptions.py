"""Subscriptions that outlive their readers: making one costs a connection, handing one on a round trip.

What is published while a subscription is confirmed is dropped: it stands in the log, which is read next.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import redis

from tasks import connections

if TYPE_CHECKING:
    from redis.client import PubSub

MAX_IDLE = 64
_POLL_S = 1.0
_FAREWELL_S = 1.0

_idle: list[tuple[int, PubSub]] = []


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


def hears(pubsub: PubSub) -> bool:
    """Has anything come through that was published before this? What has is dropped: read the log again."""
    heard = False
    pubsub.ping()
    while (message := pubsub.get_message(timeout=_FAREWELL_S)) is not None:
        if message["type"] == "pong":
            return heard
        heard |= message["type"] == "message"
    return False


def forget() -> None:
    """The idle ones may lead to a Redis where nothing is published any more."""
    while (pubsub := _take_idle()) is not None:
        pubsub.close()


def _take_idle() -> PubSub | None:
    """One of this process (a forked child has its parent's list), and of the Redis that is now set."""
    while True:
        try:
            pid, pubsub = _idle.pop()
        except IndexError:
            return None
        if pid == os.getpid() and pubsub.connection_pool is connections.streams().connection_pool:
            return pubsub


def _confirmed(pubsub: PubSub, kind: str, channel: str, patience_s: float) -> None:
    give_up_at = time.monotonic() + patience_s
    while not _is(pubsub.get_message(timeout=min(_POLL_S, patience_s)), kind, channel):
        if time.monotonic() > give_up_at:
            raise redis.TimeoutError(f"no answer to {kind}")


def data(message: dict[str, Any] | None) -> bytes | None:
    """What was published, or None for silence and for the answers to commands."""
    return message["data"] if message is not None and message["type"] == "message" else None


def _is(message: dict[str, Any] | None, kind: str, channel: str) -> bool:
    return message is not None and message["type"] == kind and message["channel"] == channel.encode()
