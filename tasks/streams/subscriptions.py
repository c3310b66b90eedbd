"""A pool of pub/sub connections. A new subscription takes a connection; a reused connection takes one round trip.

Messages that arrive before the subscription is confirmed are dropped: the log has them, and the reader reads the
log next."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import redis

from petiole.tasks.servers import connections

if TYPE_CHECKING:
    from redis.client import PubSub

MAX_IDLE = 64
_POLL_S = 1.0
_REPLY_S = 1.0

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
    """End the subscription, and keep its connection for the next reader."""
    try:
        if len(_idle) < MAX_IDLE:
            pubsub.unsubscribe(channel)  # type: ignore[no-untyped-call]
            _confirmed(pubsub, "unsubscribe", channel, _REPLY_S)
            _idle.append((os.getpid(), pubsub))
            return
    except connections.LOST:
        pass
    pubsub.close()


def hears(pubsub: PubSub) -> bool:
    """Whether messages published before this call have arrived. Drops them, because the caller reads the log."""
    received = False
    pubsub.ping()
    while (message := pubsub.get_message(timeout=_REPLY_S)) is not None:
        if message["type"] == "pong":
            return received
        received |= message["type"] == "message"
    return False


def forget() -> None:
    """Close idle connections: their server may no longer be the one that workers publish to."""
    while (pubsub := _take_idle()) is not None:
        pubsub.close()


def _take_idle() -> PubSub | None:
    """An idle connection, or None. Drops connections that a fork inherited or that lead to another Redis URL."""
    while True:
        try:
            pid, pubsub = _idle.pop()
        except IndexError:
            return None
        if pid == os.getpid() and pubsub.connection_pool is connections.streams().connection_pool:
            return pubsub


def _confirmed(pubsub: PubSub, kind: str, channel: str, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not _matches(pubsub.get_message(timeout=min(_POLL_S, timeout_s)), kind, channel):
        if time.monotonic() > give_up_at:
            raise redis.TimeoutError(f"no answer to {kind}")


def data(message: dict[str, Any] | None) -> bytes | None:
    """The payload of a published message; None if there is no message, or if it is the reply to a command."""
    return message["data"] if message is not None and message["type"] == "message" else None


def _matches(message: dict[str, Any] | None, kind: str, channel: str) -> bool:
    return message is not None and message["type"] == kind and message["channel"] == channel.encode()
