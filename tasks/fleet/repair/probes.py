"""Checks whether each Redis takes writes. A Redis that is full, or has lost its replicas, still answers reads:
workers cannot report there, and look dead."""

from __future__ import annotations

from typing import Any

import redis

from petiole.tasks.keys import PROBE_KEY
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.urls import RABBITMQ, scheme

_WRITE = ("LPUSHX", PROBE_KEY, "")
"""A write that changes nothing, because there is no such key. It is refused whenever writes are refused, also for
lack of memory. Who may send it can do no harm with it."""


def refusal(client: Any) -> str | None:
    """Why the Redis of this client takes no writes; empty if it takes them; None if its user may not write,
    and so cannot know. Raises the errors of a lost connection."""
    try:
        client.execute_command(*_WRITE)
    except redis.exceptions.NoPermissionError:
        return None
    except redis.ResponseError as error:
        return str(error)
    return ""


def refused_writes() -> dict[str, str]:
    """`refusal` of the broker's and the streams' Redis, where this user can know it."""
    configured = settings()
    urls = {"broker": configured.broker_url, "streams": configured.streams_url}
    found = {}
    for name, url in urls.items():
        if scheme(url) in RABBITMQ:
            continue
        with connections.connect(url) as client:
            reason = refusal(client)
        if reason is not None:
            found[name] = reason
    return found
