"""Looks at each Redis: whether it takes writes, and how soon it answers. A Redis that is full, or has lost its
replicas, still answers reads: workers cannot report there, and look dead."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import redis

from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import PROBE_KEY

_WRITE = ("LPUSHX", PROBE_KEY, "")
"""A write that changes nothing, because there is no such key. It is refused whenever writes are refused, also for
lack of memory. Who may send it can do no harm with it."""
_TRIPS = 3
"""The quickest of these round trips counts: a process that had to wait for a core says nothing of Redis."""


class Answers(NamedTuple):
    """How a Redis answers. `refusal`: why it takes no writes; empty if it takes them; None if this user may not
    write, and so cannot know. `round_trip_s`: in seconds. `ahead_s`: how far its clock is ahead of this
    process's."""

    refusal: str | None
    round_trip_s: float
    ahead_s: float


def urls() -> dict[str, str]:
    """By what it has: the broker's and the streams' Redis."""
    configured = settings()
    found = {"broker": configured.broker_url, "streams": configured.streams_url}
    return {name: url for name, url in found.items() if scheme(url) not in RABBITMQ}


def answers() -> dict[str, Answers]:
    """The answers of each Redis. Raises the errors of a lost connection."""
    found = {}
    for name, url in urls().items():
        with connections.connect(url) as client:
            found[name] = ask(client)
    return found


def ask(client: Any) -> Answers:
    """The answers of this client's Redis. Raises the errors of a lost connection."""
    client.time()  # connects
    trips = [_trip(client) for _ in range(_TRIPS)]
    return Answers(_refusal(client), *min(trips))


def _trip(client: Any) -> tuple[float, float]:
    began = time.time()
    seconds, microseconds = client.time()
    ended = time.time()
    return ended - began, seconds + microseconds / 1e6 - (began + ended) / 2


def _refusal(client: Any) -> str | None:
    try:
        client.execute_command(*_WRITE)
    except redis.exceptions.NoPermissionError:
        return None
    except redis.ResponseError as error:
        return str(error)
    return ""
