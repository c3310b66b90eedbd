"""A real redis-server for the scripts: what they promise is what the server does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from petiole.tasks.servers.connections import connect
from petiole.tasks.worker.output.publisher import Publisher
from tests.support.site import RedisServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    client = connect(server.url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def publisher(client: redis.Redis) -> Publisher:
    """One that is not started: tests flush by hand."""
    return Publisher(client, ttl_s=60)
