"""A real redis-server for the scripts: what they promise is what the server does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.site import RedisServer

from tasks.connections import connect


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
