"""A Redis that makes room by deleting keys loses tasks without a word: a worker says so when it begins."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import redis

from tasks.connections import LOST, connect
from tasks.settings import redacted, scheme

logger = logging.getLogger(__name__)


def warn_of_eviction(urls: Iterable[str]) -> None:
    """Whoever is not allowed to ask (`INFO`), or gets no answer, says nothing."""
    for url in dict.fromkeys(urls):
        if scheme(url) in {"amqp", "amqps"}:
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
