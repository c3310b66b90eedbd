"""The readers of one event loop share a connection: what one of them does, or what happens to it, costs no other
reader a token."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, given, settings, strategies as st

from petiole.tasks.servers import connections, failover
from petiole.tasks.settings import settings as worker_settings
from petiole.tasks.streams import async_subscriptions, protocol, readers
from petiole.tasks.wire.keys import stream_keys
from tests.support.proxy import Proxy
from tests.support.site import eventually
from tests.tasks.streams.conftest import Server, Writer, token_ids


async def collected(name: str, app: Celery) -> list[int]:
    return token_ids([delta async for delta in readers.AsyncStream(name, app=app)])


async def until_subscribed(client: redis.Redis, *names: str) -> None:
    channels = {stream_keys(name).channel.encode() for name in names}
    async with asyncio.timeout(60):
        while not channels <= set(client.pubsub_channels()):
            await asyncio.sleep(0.001)


def test_a_thousand_readers_need_a_few_connections_and_one_subscription(app: Celery, client: redis.Redis) -> None:
    names = [f"t{k}" for k in range(1000)]

    async def read() -> list[list[int]]:
        others = len(client.client_list())
        readers = [asyncio.create_task(collected(name, app)) for name in names]
        await until_subscribed(client, *names)
        assert len(client.client_list(_type="pubsub")) == 1
        assert len(client.client_list()) <= others + worker_settings().stream_connections
        for k, name in enumerate(names):
            Writer(client, name).finish(k)
        return await asyncio.gather(*readers)

    found = asyncio.run(read())
    assert found == [[k] for k in range(1000)]


def test_event_loops_that_have_closed_keep_no_connection(app: Celery, client: redis.Redis) -> None:
    """A web framework that runs a coroutine from a thread makes a loop each time."""
    Writer(client, "t").finish(1)
    others = len(client.client_list())
    for _ in range(20):
        asyncio.run(collected("t", app))
    gc.collect()
    eventually(lambda: len(client.client_list()) < others + 10, "the server has noticed")


def test_one_of_two_readers_of_a_task_leaves(app: Celery, client: redis.Redis) -> None:
    async def read() -> list[int]:
        writer = Writer(client, "t")
        leaves, stays = (readers.AsyncStream("t", app=app) for _ in range(2))
        await leaves.open()
        await stays.open()
        writer.write(1)
        await anext(leaves)
        await leaves.aclose()
        writer.finish(2)
        return token_ids([delta async for delta in stays])

    assert asyncio.run(read()) == [1, 2]
    assert client.pubsub_channels() == []


def test_a_reader_that_is_far_behind_reads_the_log(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE_S", 3600.0)
    monkeypatch.setattr(async_subscriptions, "MAX_BEHIND", 5)

    async def read() -> list[int]:
        reader, writer = readers.AsyncStream("t", app=app), Writer(client, "t")
        await reader.open()
        writer.write(0)
        first = await anext(reader)
        for token in range(1, 50):
            writer.write(token)
        await asyncio.sleep(0.2)  # all of them are heard meanwhile
        writer.finish(50)
        return [*first.token_ids, *token_ids([delta async for delta in reader])]

    assert asyncio.run(read()) == list(range(51))


def test_what_comes_just_after_a_silence_costs_nobody_the_connection(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in the log before it is heard, as if it had been missed."""
    monkeypatch.setattr(protocol, "SILENCE_S", 0.001)
    writer = Writer(client, "t")

    async def write() -> None:
        for token in range(200):
            await asyncio.sleep(0.001)
            writer.write(token)
        writer.finish()

    async def read() -> list[int]:
        reader = asyncio.create_task(collected("t", app))
        await until_subscribed(client, "t")
        other = readers.AsyncStream("u", app=app)
        await other.open()
        before = [one["id"] for one in client.client_list(_type="pubsub")]
        _, found = await asyncio.gather(write(), reader)
        assert [one["id"] for one in client.client_list(_type="pubsub")] == before
        await other.aclose()
        return found

    assert asyncio.run(read()) == list(range(200))


def test_who_may_not_hear_a_channel_is_told_and_nobody_else(
    app: Celery, server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = f"&{stream_keys('t').channel}"
    client.execute_command("ACL", "SETUSER", "one", "on", ">secret", "~*", "+@all", "resetchannels", channel)
    monkeypatch.setattr(connections, "redis_url", lambda _: server.url.replace("unix://", "unix://one:secret@"))

    async def read() -> list[int]:
        reader = asyncio.create_task(collected("t", app))
        await until_subscribed(client, "t")
        with pytest.raises(redis.exceptions.NoPermissionError):
            await collected("u", app)
        Writer(client, "t").finish(1)
        return await reader

    assert asyncio.run(read()) == [1]


def test_a_connection_that_hangs_is_left_by_all(
    app: Celery, server: Server, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Proxy(tmp_path / "p.sock", server.socket)
    monkeypatch.setenv("PETIOLE_BROKER_URL", address.url)
    worker_settings.cache_clear()
    monkeypatch.setattr(connections, "REPLY_TIMEOUT_S", 0.1)
    monkeypatch.setitem(connections._OPTIONS, "socket_timeout", 0.1)

    async def read() -> list[list[int]]:
        reader = asyncio.create_task(collected("t", app))
        await until_subscribed(client, "t")
        address.hang()
        another = asyncio.create_task(collected("u", app))  # gets no answer
        await until_subscribed(client, "u")
        Writer(client, "t").finish(1)
        Writer(client, "u").finish(2)
        return await asyncio.gather(reader, another)

    assert asyncio.run(read()) == [[1], [2]]
    address.close()


@pytest.mark.parametrize("option", ["health_check_interval=1", "protocol=3"])
def test_what_an_address_asks_of_redis_py_costs_nobody_the_connection(
    app: Celery, server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(connections, "redis_url", lambda _: f"{server.url}&{option}")
    monkeypatch.setattr(connections, "REPLY_TIMEOUT_S", 1.0)

    async def read() -> list[list[int]]:
        several = [readers.AsyncStream(name, app=app) for name in "tu"]
        await several[0].open()
        line = async_subscriptions._shared_connections()._current
        assert line is not None
        line._connection.next_health_check = 0.0  # it is due
        await several[1].open()
        assert line.lost is None
        for token, name in enumerate("tu"):
            Writer(client, name).finish(token)
        return [token_ids([delta async for delta in reader]) for reader in several]

    assert asyncio.run(read()) == [[0], [1]]


@pytest.mark.parametrize("later", range(6))
def test_who_is_cancelled_while_a_command_is_sent_leaves_the_pool_no_answer_of_a_subscription(
    app: Celery, client: redis.Redis, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py closes a connection whose command was cut off, and opens it again for the next command."""
    monkeypatch.setattr(failover, "SOON_WRITTEN", 0)  # the sender waits

    async def turns(n: int) -> None:
        for _ in range(n):
            await asyncio.sleep(0)

    def answering() -> set[str]:
        return {one["id"] for one in client.client_list() if one["cmd"] in ("subscribe", "unsubscribe")}

    async def leave() -> None:
        before = answering()  # of event loops that have closed
        other = readers.AsyncStream("t", app=app)
        await other.open()
        line = async_subscriptions._shared_connections()._current
        assert line is not None
        line._connection._writer.transport.get_protocol().pause_writing()
        cut_off = asyncio.create_task(readers.AsyncStream("u", app=app).open())
        await turns(5)
        cut_off.cancel()
        await turns(later)
        await other.aclose()
        await asyncio.wait([cut_off])
        async with asyncio.timeout(10):
            while answering() - before:
                await asyncio.sleep(0.01)

    asyncio.run(leave())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_readers_that_come_and_go_miss_nothing_whatever_happens_to_their_connection(
    app: Celery, client: redis.Redis, impatient: None, seed: int
) -> None:
    rng = random.Random(seed)
    client.flushall()
    length = rng.randint(1, 30)
    writers = [Writer(client, f"t{k}") for k in range(rng.randint(1, 6))]

    async def write() -> None:
        unfinished = list(writers)
        while unfinished:
            writer = rng.choice(unfinished)
            if writer.index < length:
                writer.write(writer.index, publish=rng.random() < 0.9)
            else:
                writer.finish()
                unfinished.remove(writer)
            if rng.random() < 0.05:
                client.client_kill_filter(_type="pubsub")
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() / 500)

    async def read(name: str) -> list[int]:
        await asyncio.sleep(rng.random() / 50)
        return await collected(name, app)

    async def leave(name: str) -> None:
        reader = asyncio.create_task(collected(name, app))
        await asyncio.sleep(rng.random() / 20)
        reader.cancel()
        await asyncio.wait([reader])

    async def everything() -> list[list[int]]:
        names = [writer.task_id for writer in writers] * 2
        leaving = [asyncio.create_task(leave(rng.choice(names))) for _ in range(rng.randint(0, 6))]
        *found, _ = await asyncio.gather(*(read(name) for name in names), write())
        await asyncio.gather(*leaving)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:  # a shared look, which ends by itself
            _, others = await asyncio.wait(others, timeout=60)
        assert not others, f"still there: {others}"
        return found

    async def in_time() -> list[list[int]]:
        async with asyncio.timeout(60):
            return await everything()

    assert all(tokens == list(range(length)) for tokens in asyncio.run(in_time()))
    assert client.pubsub_channels() == []
