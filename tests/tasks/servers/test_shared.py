"""Callers of an event loop share a connection: each gets its own replies, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from petiole.tasks.servers import connections, failover, shared
from petiole.tasks.servers.replies import DamagedKey
from petiole.tasks.settings import settings
from tests.support.site import RedisServer, eventually


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    yield server
    server.kill()
    settings.cache_clear()


async def ask(*commands: tuple[Any, ...]) -> list[Any]:
    return await connections.aperform(commands, raises=False)


def test_each_caller_gets_its_own_replies_though_others_leave(server: RedisServer) -> None:
    """At any moment, and with replies of any length."""
    chance = random.Random(seed := random.randrange(10**6))

    async def caller(name: int) -> None:
        size = chance.choice([1, 100, 300_000])
        text = f"{name}:".encode() + b"x" * size
        found = await ask(("SET", f"k{name}", text), ("GET", f"k{name}"), ("HGETALL", f"k{name}"), ("ECHO", name))
        assert found[0] is True
        assert found[1] == text, seed
        assert isinstance(found[2], DamagedKey)
        assert found[3] == str(name).encode()
        assert await connections.async_streams().get(f"k{name}") == text

    async def main() -> None:
        tasks = []
        for name in range(150):
            tasks.append(task := asyncio.create_task(caller(name)))
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                task.cancel()
        await asyncio.wait(tasks, timeout=60)
        assert all(task.done() for task in tasks), seed
        assert not [task for task in tasks if not task.cancelled() and task.exception()], seed
        assert sum(not task.cancelled() for task in tasks) > 50
        assert len(await connections.async_streams().client_list()) == 1, "one connection for all"

    asyncio.run(main())


def test_a_connection_that_is_lost_fails_what_was_on_its_way_and_is_replaced(server: RedisServer) -> None:
    async def main() -> None:
        assert await ask(("SET", "a", "1")) == [True]
        waiting = [asyncio.create_task(ask(("BLPOP", f"none{k}", 0))) for k in range(3)]
        with redis.Redis(unix_socket_path=str(server.socket)) as client:
            await asyncio.to_thread(eventually, lambda: client.info("clients")["blocked_clients"] == 1)
            client.client_kill_filter(_type="normal", skipme=True)
            for failed in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(failed, redis.ConnectionError)
            assert await ask(("GET", "a")) == [b"1"]
            client.client_kill_filter(_type="normal", skipme=True)  # while nobody waits
            connection: Any = connections.async_streams().shared._connection
            while not connection.has_ended:
                await asyncio.sleep(0.01)
        assert await ask(("GET", "a")) == [b"1"]

    asyncio.run(main())


def test_a_server_that_does_not_reply_is_given_up(server: RedisServer) -> None:
    async def main() -> None:
        line = shared.SharedConnection(connections.async_streams().connection_pool, 0.2)
        with pytest.raises(redis.TimeoutError):
            await line.send([("BLPOP", "none", 0)])
        assert (await line.send([("ECHO", "there")])) == [b"there"]

    asyncio.run(main())


def test_what_cannot_be_sent_harms_nobody(server: RedisServer) -> None:
    async def main() -> None:
        with pytest.raises(redis.DataError):
            await ask(("SET", "a", object()))
        assert await ask(("ECHO", "there")) == [b"there"]
        assert await connections.aperform([]) == []
        with pytest.raises(redis.ResponseError):
            await connections.aperform([("ECHO", "x"), ("NONSENSE",), ("SET", "after", "1")])
        assert await ask(("GET", "after")) == [b"1"], "as in a pipeline"

    asyncio.run(main())


def test_a_demoted_master_is_left(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on to answer reads, with what is old: the check that goes ahead of the commands finds out."""
    monkeypatch.setattr(failover, "CHECK_S", 0.0)

    async def main() -> None:
        assert await ask(("GET", "a")) == [None]
        with redis.Redis(unix_socket_path=str(server.socket)) as client:
            client.replicaof("127.0.0.1", "1")
            with pytest.raises(redis.ConnectionError, match=r"READONLY|lost"):
                await ask(("GET", "a"))
            client.replicaof("NO", "ONE")
        assert await ask(("GET", "a")) == [None]

    asyncio.run(main())


def test_without_a_server_every_caller_is_told(server: RedisServer) -> None:
    server.kill()

    async def main() -> None:
        outcomes = await asyncio.gather(*(ask(("PING",)) for _ in range(20)), return_exceptions=True)
        assert all(isinstance(one, connections.LOST) for one in outcomes)
        server.restart()
        assert await ask(("ECHO", "there")) == [b"there"]

    asyncio.run(main())


def test_a_loop_may_end_at_any_moment(server: RedisServer) -> None:
    for turns in range(12):

        async def main(turns: int = turns) -> None:
            asyncio.create_task(ask(("ECHO", "x")))  # noqa: RUF006
            for _ in range(turns):
                await asyncio.sleep(0)

        asyncio.run(main())
