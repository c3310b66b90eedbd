"""Late, reconnecting and concurrent readers all get the same whole stream, each token once."""

from __future__ import annotations

import asyncio

import pytest
import redis
from celery import Celery

from petiole import tasks
from petiole.contract.results.task_result import StreamDelta
from petiole.tasks import errors
from petiole.tasks.streams import protocol, readers
from petiole.tasks.wire.keys import stream_keys
from tests.tasks.streams.conftest import Read, Writer, text, token_ids


def test_a_reader_that_was_there_from_the_start(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")

    def write() -> None:
        writer.write(1)
        writer.write(2, 3)
        writer.finish()

    deltas = read("t", during=write)
    assert [delta.token_ids for delta in deltas] == [[1], [2, 3], []]
    assert text(deltas) == "<1><2><3>"
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]


def test_a_late_reader(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1)
    writer.finish(2)
    assert token_ids(read("t")) == [1, 2]


def test_a_reader_that_comes_in_the_middle(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1, 2)
    deltas = read("t", during=lambda: writer.finish(3))
    assert token_ids(deltas) == [1, 2, 3]


def test_what_the_log_had_is_not_repeated_by_the_channel(read: Read, client: redis.Redis) -> None:
    """Written between subscription and log: heard and read."""
    writer = Writer(client, "t")

    def write() -> None:
        writer.write(1)
        writer.write(2)

    deltas = read("t", during=write, between=lambda: writer.finish(3) if writer.index == 2 else None)
    assert token_ids(deltas) == [1, 2, 3]


def test_a_gap_is_filled_from_the_log_at_once(
    read: Read, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE_S", 3600.0)
    writer = Writer(client, "t")
    writer.write(1)

    def lose_one() -> None:
        if writer.index == 1:
            writer.write(2, publish=False)
            writer.finish(3)

    assert token_ids(read("t", between=lose_one)) == [1, 2, 3]


def test_a_lost_end_is_found_after_a_silence(read: Read, client: redis.Redis, impatient: None) -> None:
    writer = Writer(client, "t")
    writer.write(1)
    deltas = read("t", between=lambda: writer.finish(2, publish=False) if writer.index == 1 else None)
    assert token_ids(deltas) == [1, 2]


def test_deltas_of_an_older_attempt_are_dropped(read: Read, client: redis.Redis) -> None:
    """A worker that was cut off, not dead, and whose last words come late."""
    first = Writer(client, "t")
    first.write(1, 2)

    def resume() -> None:
        second = Writer(client, "t", attempt=2, index=2)
        second.write(3)
        first.write(8, log=False)
        Writer(client, "t", attempt=1, index=3).finish(9, log=False)
        second.finish(4)

    deltas = read("t", during=resume)
    assert token_ids(deltas) == [1, 2, 3, 4]
    assert deltas[-1].attempt == 2


def test_a_resumed_stream_has_no_seam(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").write(1, 2)
    deltas = read("t", during=lambda: Writer(client, "t", attempt=2, index=2).finish(3, 4))
    assert [(delta.index, delta.attempt) for delta in deltas] == [(0, 1), (2, 2)]
    assert text(deltas) == "<1><2><3><4>"


def test_a_log_that_was_lost_and_written_anew_in_other_pieces(
    read: Read, client: redis.Redis, impatient: None
) -> None:
    writer = Writer(client, "t")
    writer.write(1, 2)
    writer.write(3)

    def lose_and_write_anew() -> None:
        if writer.index == 3:
            client.delete(stream_keys("t").log)
            again = Writer(client, "t", attempt=2)
            again.write(1)
            again.write(2, 3, 4)
            again.finish(5)
            writer.index = again.index

    deltas = read("t", between=lose_and_write_anew)
    assert token_ids(deltas) == [1, 2, 3, 4, 5]
    assert text(deltas) == "<1><2><3><4><5>"


def test_many_readers_at_once(app: Celery, client: redis.Redis) -> None:
    several = [readers.Stream("t", app=app) for _ in range(5)]
    for reader in several[:3]:
        reader.open()
    writer = Writer(client, "t")
    writer.write(1)
    assert next(several[0]).token_ids == [1]
    for token in range(2, 50):
        writer.write(token)
    writer.finish()
    assert token_ids(list(several[0])) == list(range(2, 50))
    for reader in several[1:]:
        assert token_ids(list(reader)) == list(range(1, 50))


def test_nothing_limits_the_readers_of_one_event_loop(app: Celery, client: redis.Redis) -> None:
    async def all_of_them() -> list[list[StreamDelta]]:
        several = [readers.AsyncStream("t", app=app) for _ in range(120)]
        for reader in several:
            await reader.open()
        Writer(client, "t").finish(1, 2, 3)
        return await asyncio.gather(*(collected(reader) for reader in several))

    async def collected(reader: readers.AsyncStream) -> list[StreamDelta]:
        return [delta async for delta in reader]

    assert all(token_ids(deltas) == [1, 2, 3] for deltas in asyncio.run(all_of_them()))


def test_readers_share_connections(app: Celery, client: redis.Redis) -> None:
    Writer(client, "t").finish(1)
    list(readers.Stream("t", app=app))
    connected = client.info("stats")["total_connections_received"]
    for _ in range(20):
        list(readers.Stream("t", app=app))
    assert client.info("stats")["total_connections_received"] == connected


def test_asynchronous_readers_share_connections(app: Celery, client: redis.Redis) -> None:
    Writer(client, "t").finish(1)

    async def read_often() -> tuple[int, int]:
        [delta async for delta in readers.AsyncStream("t", app=app)]
        before = client.info("stats")["total_connections_received"]
        for _ in range(20):
            [delta async for delta in readers.AsyncStream("t", app=app)]
        return before, client.info("stats")["total_connections_received"]

    before, after = asyncio.run(read_often())
    assert before == after


def test_a_reused_subscription_hears_nothing_of_the_stream_before(app: Celery, client: redis.Redis) -> None:
    first = Writer(client, "first")
    with readers.Stream("first", app=app) as reader:
        reader.open()
    first.write(8)
    Writer(client, "second").finish(1)
    assert token_ids(list(readers.Stream("second", app=app))) == [1]


def test_what_later_versions_add_is_ignored(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").finish(1, temperature_of_the_room=21)
    assert isinstance(read("t")[0], StreamDelta)


def test_what_is_no_delta_is_an_error_of_the_stream(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").write(1)
    client.rpush(stream_keys("t").log, "garbage")
    with pytest.raises(tasks.StreamError, match="task t: a delta of its stream cannot be read: Invalid JSON"):
        read("t")


def test_a_log_that_is_no_list_is_an_error_of_the_stream_that_names_it(read: Read, client: redis.Redis) -> None:
    client.set(stream_keys("task").log, "somebody's")
    with pytest.raises(
        errors.StreamError, match=r"task task: its stream in Redis is damaged: petiole:\{task\}:log must be"
    ):
        read("task")
