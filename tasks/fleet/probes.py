"""Checks whether each Redis takes writes. A Redis that is full, or has lost its replicas, still answers reads:
workers cannot report there, and look dead."""

from __future__ import annotations

import redis

from petiole.tasks.keys import PROBE_KEY
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.urls import RABBITMQ, scheme

_WRITE = ("SETRANGE", PROBE_KEY, 0, "")
"""A write that changes nothing, and is refused whenever writes are refused, also for lack of memory."""


def refused_writes() -> dict[str, str]:
    """For the broker's and the streams' Redis: the reason why it takes no writes; empty if it takes them. A Redis
    user without the right to write cannot know, and gets no answer. Raises the errors of a lost connection."""
    configured = settings()
    urls = {"broker": configured.broker_url, "streams": configured.streams_url}
    found = {}
    for name, url in urls.items():
        if scheme(url) in RABBITMQ:
            continue
        try:
            with connections.connect(url) as client:
                client.execute_command(*_WRITE)
        except redis.exceptions.NoPermissionError:
            continue
        except redis.ResponseError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found
