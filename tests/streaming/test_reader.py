"""Late, reconnecting and concurrent readers all get the same whole stream, each token once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import redis
from celery import Celery
from celery.result import EagerResult
from support.proxy import Proxy

import tasks
from tasks import connections, errors, following, streaming
from tasks.schemas import StreamDelta, stream_keys
from tasks.settings import settings

from .conftest import Read, Server, Writer, text, token_ids

RESULT = {
    "text": "<1><2><3>",
    "token_ids": [1, 2, 3],
    "finish_reason": "stop",
    "stop_reason": "eos",
    "usage": {"prompt_tokens": 1, "cached_prompt_tokens": 0, "completion_tokens": 3},
    "timing": {"queue_ms": 0.0, "prefill_ms": 1.0, "ttft_ms": 1.0, "total_ms": 2.0},
    "model": "m",
    "attempt": 1,
}


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
    monkeypatch.setattr(following, "SILENCE_S", 3600.0)
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


def test_a_cut_connection_is_made_anew(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1)

    def cut() -> None:
        if writer.index == 1:
            client.client_kill_filter(_type="pubsub")
            writer.write(2)
            writer.finish(3)

    assert token_ids(read("t", between=cut)) == [1, 2, 3]


def test_a_subscription_that_cannot_be_made_anew_costs_no_token() -> None:
    """After a silence in which something was missed."""
    first, second = (
        StreamDelta(task_id="t", attempt=1, index=k, token_ids=[k], text="", finish_reason=reason)
        for k, reason in enumerate((None, "stop"))
    )
    reading = following.read("t", timeout_s=None)
    assert next(reading) == ("subscribe",)
    assert reading.send(None) == ("read_log", 0)
    assert reading.send(([], 0)) == ("receive", following.SILENCE_S)
    assert reading.send(None) == ("outcome",)
    assert reading.send((None, None)) == ("read_log", 0)
    assert reading.send(([first.model_dump_json()], 1)) == first
    assert next(reading) == ("hears",)
    assert reading.send(False) == ("distrust",)
    assert reading.send(None) == ("subscribe",)
    assert reading.throw(following.Lost(OSError()))[0] == "pause"
    assert next(reading) == ("subscribe",)
    assert reading.send(None) == ("read_log", 0)
    assert reading.send(([delta.model_dump_json() for delta in (first, second)], 2)) == second
    with pytest.raises(StopIteration):
        next(reading)


def test_a_restart_of_redis_is_survived(read: Read, server: Server, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1)
    restarts = []

    def restart() -> None:
        if not restarts:
            restarts.append(1)
            server.kill()
            thread = threading.Thread(target=lambda: (server.start(), writer.finish(2)))
            thread.start()

    assert token_ids(read("t", between=restart)) == [1, 2]


def test_a_master_that_became_a_replica_and_keeps_its_connections_is_left(
    read: Read, app: Celery, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers reads with what it had, and nothing is published on it."""
    promoted, address = Server(tmp_path), Proxy(tmp_path / "p.sock", server.socket)
    old, new = (redis.Redis.from_url(one.url) for one in (server, promoted))
    monkeypatch.setenv("PETIOLE_BROKER_URL", address.url)
    settings.cache_clear()
    monkeypatch.setattr(following, "SILENCE_S", 0.1)
    readers = [streaming.Stream(name, app=app) for name in "uvw"]
    for reader in readers:
        reader.open()
    for reader in readers:
        reader.close()  # their subscriptions are kept for others

    for client in (old, new):
        Writer(client, "t").write(1)

    def fail_over() -> None:
        if address.upstream == server.socket:
            address.upstream = promoted.socket
            old.replicaof("127.0.0.1", 1)
            Writer(new, "t", index=1).finish(2)

    try:
        assert token_ids(read("t", between=fail_over)) == [1, 2]
        monkeypatch.setattr(following, "SILENCE_S", 3600.0)
        with streaming.Stream("u", app=app) as first:
            first.open()  # takes the newest subscription
            writer = Writer(new, "v")
            writer.write(3)
            assert token_ids(read("v", between=lambda: writer.index == 1 and writer.finish(4))) == [3, 4]
    finally:
        old.replicaof("NO", "ONE")
        promoted.kill()


def test_a_user_who_may_not_write_may_read(server: Server, client: redis.Redis) -> None:
    client.set("petiole:k", 1)
    client.execute_command(
        "ACL", "SETUSER", "reader", "on", ">secret", "~petiole*", "-@all", "+@connection", "+get"
    )
    reading = connections.connect(server.url.replace("unix://", "unix://reader:secret@"))
    assert reading.get("petiole:k") == b"1"


def test_redis_away_for_good_ends_the_wait(read: Read, server: Server, client: redis.Redis) -> None:
    Writer(client, "t").write(1)
    with pytest.raises(errors.StreamTimeout) as raised:
        read("t", between=server.kill, timeout_s=0.2)
    assert isinstance(raised.value.__cause__, connections.LOST)


def test_nothing_for_too_long_is_a_timeout(read: Read, client: redis.Redis, impatient: None) -> None:
    Writer(client, "t").write(1)
    with pytest.raises(TimeoutError, match=r"task t: no delta for 0\.05 s"):
        read("t", timeout_s=0.05)


def test_many_readers_at_once(app: Celery, client: redis.Redis) -> None:
    readers = [streaming.Stream("t", app=app) for _ in range(5)]
    for reader in readers[:3]:
        reader.open()
    writer = Writer(client, "t")
    writer.write(1)
    assert next(readers[0]).token_ids == [1]
    for token in range(2, 50):
        writer.write(token)
    writer.finish()
    assert token_ids(list(readers[0])) == list(range(2, 50))
    for reader in readers[1:]:
        assert token_ids(list(reader)) == list(range(1, 50))


def test_nothing_limits_the_readers_of_one_event_loop(app: Celery, client: redis.Redis) -> None:
    async def all_of_them() -> list[list[StreamDelta]]:
        readers = [streaming.AsyncStream("t", app=app) for _ in range(120)]
        for reader in readers:
            await reader.open()
        Writer(client, "t").finish(1, 2, 3)
        return await asyncio.gather(*(collected(reader) for reader in readers))

    async def collected(reader: streaming.AsyncStream) -> list[StreamDelta]:
        return [delta async for delta in reader]

    assert all(token_ids(deltas) == [1, 2, 3] for deltas in asyncio.run(all_of_them()))


def test_readers_share_connections(app: Celery, client: redis.Redis) -> None:
    Writer(client, "t").finish(1)
    list(streaming.Stream("t", app=app))
    connected = client.info("stats")["total_connections_received"]
    for _ in range(20):
        list(streaming.Stream("t", app=app))
    assert client.info("stats")["total_connections_received"] == connected


def test_asynchronous_readers_share_connections(app: Celery, client: redis.Redis) -> None:
    Writer(client, "t").finish(1)

    async def read_often() -> tuple[int, int]:
        [delta async for delta in streaming.AsyncStream("t", app=app)]
        before = client.info("stats")["total_connections_received"]
        for _ in range(20):
            [delta async for delta in streaming.AsyncStream("t", app=app)]
        return before, client.info("stats")["total_connections_received"]

    before, after = asyncio.run(read_often())
    assert before == after


def test_an_eager_result_has_a_stream_too(app: Celery) -> None:
    (delta,) = streaming.Stream(EagerResult("t", RESULT, "SUCCESS"), app=app)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("<1><2><3>", [1, 2, 3], "stop")
    with pytest.raises(ValueError, match="bad"):
        list(streaming.Stream(EagerResult("t", ValueError("bad"), "FAILURE"), app=app))


def test_a_reused_subscription_hears_nothing_of_the_stream_before(app: Celery, client: redis.Redis) -> None:
    first = Writer(client, "first")
    with streaming.Stream("first", app=app) as reader:
        reader.open()
    first.write(8)
    Writer(client, "second").finish(1)
    assert token_ids(list(streaming.Stream("second", app=app))) == [1]


@pytest.mark.parametrize("reason", ["revoked", "expired"])
def test_a_task_revoked_before_it_began(read: Read, app: Celery, impatient: None, reason: str) -> None:
    """By a worker of another app, too, which shares Petiole's Redis and writes no stream."""
    app.backend.mark_as_revoked("t", reason)
    assert [(delta.finish_reason, delta.stop_reason) for delta in read("t")] == [("cancelled", reason)]


def test_a_failed_task_ends_with_an_error_and_then_raises_it(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1)
    error = errors.describe(errors.InvalidRequest("max_tokens", "must be at most 64", 65))
    seen: list[int] = []
    writer.finish(finish_reason="error", error=error)
    with pytest.raises(tasks.InvalidRequest, match="max_tokens: must be at most 64, got 65"):
        read("t", between=lambda: seen.append(1))
    assert len(seen) == 2


def test_a_task_that_failed_without_a_stream(read: Read, app: Celery, impatient: None) -> None:
    app.backend.mark_as_failure("t", errors.InvalidRequest("prompt", "must not be empty", "''"))
    with pytest.raises(tasks.InvalidRequest, match="prompt: must not be empty, got ''"):
        read("t")


def test_a_task_that_failed_with_an_error_of_the_network(read: Read, app: Celery, impatient: None) -> None:
    """The task's error, and none of the reader's."""
    app.backend.mark_as_failure("t", ConnectionResetError("the adapter's server is away"))
    with pytest.raises(ConnectionResetError, match="the adapter's server is away"):
        read("t")


def test_an_expired_log_is_made_up_for_by_the_result(read: Read, app: Celery, impatient: None) -> None:
    app.backend.mark_as_done("t", RESULT)
    (delta,) = read("t")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("<1><2><3>", [1, 2, 3], "stop")


def test_a_log_that_expires_under_the_reader_is_made_up_for(
    read: Read, app: Celery, client: redis.Redis, impatient: None
) -> None:
    Writer(client, "t").write(1)

    def expire() -> None:
        client.delete(stream_keys("t").log)
        app.backend.mark_as_done("t", RESULT)

    deltas = read("t", between=expire)
    assert [(delta.index, delta.token_ids, delta.text) for delta in deltas] == [
        (0, [1], "<1>"),
        (1, [2, 3], "<2><3>"),
    ]


def test_neither_log_nor_result(read: Read, client: redis.Redis, impatient: None) -> None:
    Writer(client, "t").write(1)
    with pytest.raises(errors.StreamExpired, match="its log is gone after token 1"):
        read("t", between=lambda: client.delete(stream_keys("t").log))


def test_a_reader_that_goes_away_cancels_its_task(app: Celery, client: redis.Redis) -> None:
    keys = stream_keys("t")
    Writer(client, "t").write(1)
    with streaming.Stream("t", cancel_on_disconnect=True, app=app) as reader:
        next(reader)
        assert client.ttl(keys.interest) > 0
        assert client.hget(keys.state, "cancel") is None
    assert client.hget(keys.state, "cancel") == b"1"
    assert client.ttl(keys.state) > 0


def test_an_asynchronous_reader_that_is_cancelled_at_every_turn_cancels_its_task(
    app: Celery, client: redis.Redis
) -> None:
    """So do web frameworks on anyio (Starlette, FastAPI) when a client goes away."""
    keys = stream_keys("t")
    Writer(client, "t").write(1)

    async def abandon() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in streaming.AsyncStream("t", cancel_on_disconnect=True, app=app):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        while not reading.done():
            reading.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while client.hget(keys.state, "cancel") is None or client.pubsub_channels(keys.channel):
                await asyncio.sleep(0.01)

    asyncio.run(abandon())


def test_a_stream_read_to_its_end_cancels_nothing(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").finish(1)
    read("t", cancel_on_disconnect=True)
    assert client.hget(stream_keys("t").state, "cancel") is None


def test_what_later_versions_add_is_ignored(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").finish(1, temperature_of_the_room=21)
    assert isinstance(read("t")[0], StreamDelta)


def test_what_is_no_delta_is_an_error_of_the_stream(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").write(1)
    client.rpush(stream_keys("t").log, "garbage")
    with pytest.raises(tasks.StreamError, match="task t: a delta of its stream cannot be read: Invalid JSON"):
        read("t")
