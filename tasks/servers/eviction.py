"""Warns at start-up of a Redis that evicts keys when its memory is full: it would lose tasks silently."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import redis

from petiole.contract.settings.urls import RABBITMQ, redacted, scheme
from petiole.tasks.servers.connections import LOST, connect

logger = logging.getLogger(__name__)


def warn_of_eviction(urls: Iterable[str]) -> None:
    """Log a warning if the Redis evicts keys. Silent if `INFO` is denied or gets no reply."""
    for url in dict.fromkeys(urls):
        if scheme(url) in RABBITMQ:
            continue
        try:
            with connect(url) as client:
                memory = client.info("memory")
        except (*LOST, redis.RedisError):
            continue
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory") and policy != "noeviction":
            logger.warning(
                "%s deletes tasks and streams when it is full: its maxmemory-policy is %s, set noeviction",
                redacted(url),
                policy,
            )
