"""Readers that leave, all at once and at any moment, are gone, and the readers that stay miss nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from celery import Celery

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.streams.callback_reader import CallbackStream
from petiole.tasks.wire.keys import stream_keys
from tests.tasks.streams.conftest import Writer, token_ids


def test_who_has_read_a_stream_for_others_leaves_its_channel_soon(app: Celery, client: redis.Redis) -> None:
    """With the next one's subscription, or without."""

    def heard(*names: str) -> list[int]:
        return [number for _, number in client.pubsub_numsub(*(stream_keys(name).channel for name in names))]

    async def read(name: str) -> None:
        reader = CallbackStream(name, lambda _: None, app=app)
        await reader.open()
        reading = asyncio.create_task(reader.run())
        Writer(client, name).finish(1)
        async with asyncio.timeout(30):
            await reading

    async def leave() -> None:
        await read("first")
        staying = CallbackStream("staying", lambda _: None, app=app)
        await staying.open()
        assert heard("first", "staying") == [0, 1]
        await staying.aclose()
        await read("last")
        async with asyncio.timeout(30):
            while heard("staying", "last") != [0, 0]:
                await asyncio.sleep(0.01)
        await read("last")

    asyncio.run(leave())


TURNS = 60
"""Of the event loop, that a reader's first commands take at most."""


def test_readers_that_are_cancelled_between_any_two_turns_of_the_loop_end(
    app: Celery, client: redis.Redis
) -> None:
    async def leave() -> list[int]:
        staying: list[StreamDelta] = []
        reader = CallbackStream("stays", staying.append, app=app)
        await reader.open()
        reading = asyncio.create_task(reader.run())
        for turns in range(TURNS):
            streams = [CallbackStream(f"t{turns}-{k}", lambda _: None, app=app, prepared=True) for k in range(20)]
            leaving = [asyncio.create_task(stream.run()) for stream in streams]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            _, there = await asyncio.wait(leaving, timeout=30)
            assert not there, f"{len(there)} readers went on, cancelled after {turns} turns"
        Writer(client, "stays").finish(1)
        async with asyncio.timeout(30):
            await reading
        return token_ids(staying)

    assert asyncio.run(leave()) == [1]


def test_callers_that_are_cancelled_when_their_turn_has_come_leave_the_connections_to_others(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_STREAM_CONNECTIONS", "2")
    settings.cache_clear()

    async def ping() -> list[object]:
        async with connections.async_streams().pipeline(transaction=False) as pipe:
            pipe.ping()
            return await pipe.execute()

    async def waits(caller: asyncio.Task[list[object]]) -> None:
        """Until it stands in the line: it gets there without waiting for anything else."""
        for _ in range(10):
            await asyncio.sleep(0)
        assert not caller.done()

    async def stay() -> list[object]:
        pool: Any = connections.async_streams().connection_pool
        held = [await pool.get_connection() for _ in range(2)]
        leaving = [asyncio.create_task(ping()) for _ in held]
        await waits(leaving[-1])
        staying = asyncio.create_task(ping())
        await waits(staying)
        for connection in held:
            await pool.release(connection)
        for task in leaving:
            task.cancel()
        async with asyncio.timeout(15):
            return await staying

    assert asyncio.run(stay()) == [True]
