"""Silent streams look together, and what one of them missed is found."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import redis
from celery import Celery

from petiole.tasks.servers import connections
from petiole.tasks.streams import polling, protocol, readers
from petiole.tasks.streams.async_subscriptions import Subscription
from petiole.tasks.streams.polling import IdleStream
from petiole.tasks.wire.keys import stream_keys
from tests.tasks.streams.conftest import Writer, token_ids


def ask(*streams: IdleStream) -> list[bool]:
    async def together() -> list[bool]:
        return await asyncio.gather(*(polling.stream_poller().quiet(stream) for stream in streams))

    return asyncio.run(together())


def test_a_stream_is_quiet_if_neither_its_log_nor_its_state_nor_its_result_says_otherwise(
    app: Celery, client: redis.Redis
) -> None:
    Writer(client, "grown").write(1, 2)
    client.hset(stream_keys("announced").state, "prepared", "{}")
    client.set(stream_keys("damaged").log, "no list")
    client.set(app.backend.get_key_for_task("ended"), json.dumps({"status": "REVOKED", "result": None}))
    backend, interest = app.backend, stream_keys("silent").interest
    streams = [
        (IdleStream("silent", backend, 0, True, [("SET", interest, 1, "EX", 9)]), True),
        (IdleStream("grown", backend, 1, False), True),
        (IdleStream("grown", backend, 0, False), False),
        (IdleStream("lost", backend, 1, False), False),
        (IdleStream("announced", backend, 0, True), False),
        (IdleStream("announced", backend, 0, False), True),
        (IdleStream("damaged", backend, 0, False), False),
        (IdleStream("ended", backend, 0, False), False),
    ]
    assert ask(*(stream for stream, _ in streams)) == [quiet for _, quiet in streams]
    assert client.exists(interest)


def test_a_backend_that_is_no_redis_and_a_redis_that_is_away_say_nothing(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Celery(backend="cache+memory://")
    assert ask(IdleStream("t", other.backend, 0, False), IdleStream("t", app.backend, 0, False)) == [False, True]

    async def away(*_: Any, **__: Any) -> None:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(connections, "aperform", away)
    assert ask(IdleStream("t", app.backend, 0, False)) == [False]


def test_what_pubsub_loses_is_found_by_streams_that_look_together(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer publishes nothing, so each token is found by a look; and streams that get nothing cost few
    commands."""
    monkeypatch.setattr(protocol, "SILENCE_S", 0.01)
    looks: list[int] = []
    look = polling._look

    async def counted(streams: Any) -> list[bool]:
        looks.append(len(streams))
        return await look(streams)

    monkeypatch.setattr(polling, "_look", counted)
    names = [f"t{k}" for k in range(40)]

    async def collected(name: str) -> list[int]:
        return token_ids([delta async for delta in readers.AsyncStream(name, app=app)])

    async def read() -> list[list[int]]:
        reading = [asyncio.create_task(collected(name)) for name in names]
        async with asyncio.timeout(60):
            while len(looks) < 3:
                await asyncio.sleep(0.01)
            writers = [Writer(client, name) for name in names]
            for token in range(3):
                for writer in writers:
                    (writer.finish if token == 2 else writer.write)(token, publish=False)
                seen = len(looks)
                while token < 2 and len(looks) < seen + 3:
                    await asyncio.sleep(0.01)
            return await asyncio.gather(*reading)

    assert asyncio.run(read()) == [[0, 1, 2]] * len(names)
    assert max(looks) > 1


def test_what_comes_while_a_stream_looks_is_not_held_up(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The looks take an hour."""
    monkeypatch.setattr(protocol, "SILENCE_S", 0.01)
    monkeypatch.setattr(polling, "TOGETHER_S", 3600)

    async def collected(name: str) -> list[int]:
        return token_ids([delta async for delta in readers.AsyncStream(name, app=app)])

    async def read() -> list[list[int]]:
        names = ["t", "u"]
        reading = [asyncio.create_task(collected(name)) for name in names]
        async with asyncio.timeout(60):
            while len(polling.stream_poller()._waiting) < len(names):
                await asyncio.sleep(0.01)
            for writer in [Writer(client, name) for name in names]:
                writer.write(0)
                writer.finish(1)
            return await asyncio.gather(*reading)

    assert asyncio.run(read()) == [[0, 1], [0, 1]]


def test_a_look_that_ends_after_a_message_does_not_count_as_a_silence(app: Celery, client: redis.Redis) -> None:
    async def read() -> None:
        subscription, loop = Subscription("channel"), asyncio.get_running_loop()
        await subscription.open()
        look: asyncio.Future[bool] = loop.create_future()
        waiting = asyncio.create_task(subscription.unless_heard(look))
        await asyncio.sleep(0)
        subscription.deliver(b"first")
        assert await waiting
        assert await subscription.get(60) == b"first"
        waits = asyncio.create_task(subscription.get(60))
        await asyncio.sleep(0)
        look.set_result(True)
        for _ in range(5):
            await asyncio.sleep(0)
        subscription.deliver(b"second")
        assert await waits == b"second"
        await subscription.close()

    asyncio.run(read())
