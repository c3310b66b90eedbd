"""What would be deleted without a word is announced with one."""

from __future__ import annotations

import pytest
import redis

from petiole.tasks.servers.eviction import warn_of_eviction
from tests.support.site import RedisServer


@pytest.mark.parametrize(
    ("policy", "maxmemory", "said"), [("volatile-lru", 2**30, 1), ("volatile-lru", 0, 0), ("noeviction", 2**30, 0)]
)
def test_a_redis_that_evicts_is_named_once(
    server: RedisServer,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    maxmemory: int,
    said: int,
) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", maxmemory)
    try:
        warn_of_eviction(["amqp://elsewhere", server.url, server.url, "redis://127.0.0.1:1/0"])
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    lines = [record.message for record in caplog.records]
    assert len(lines) == said
    assert all(line.startswith(f"{server.url} deletes") and policy in line for line in lines)
