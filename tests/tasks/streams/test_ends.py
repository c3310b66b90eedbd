"""However a task ended, and whatever is left of it, its stream has an end. A reader that goes away may end it."""

from __future__ import annotations

import asyncio

import pytest
import redis
from celery import Celery
from celery.result import EagerResult

from petiole import tasks
from petiole.tasks import errors
from petiole.tasks.streams import readers
from petiole.tasks.wire.keys import stream_keys
from tests.tasks.streams.conftest import Read, Writer

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


def test_an_eager_result_has_a_stream_too(app: Celery) -> None:
    (delta,) = readers.Stream(EagerResult("t", RESULT, "SUCCESS"), app=app)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("<1><2><3>", [1, 2, 3], "stop")
    with pytest.raises(ValueError, match="bad"):
        list(readers.Stream(EagerResult("t", ValueError("bad"), "FAILURE"), app=app))


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
    with readers.Stream("t", cancel_on_disconnect=True, app=app) as reader:
        next(reader)
        assert client.ttl(keys.interest) > 0
        assert client.hget(keys.asked, "cancel") is None
    assert client.hget(keys.asked, "cancel") == b"1"
    assert client.ttl(keys.asked) > 0


def test_an_asynchronous_reader_that_is_cancelled_at_every_turn_cancels_its_task(
    app: Celery, client: redis.Redis
) -> None:
    """So do web frameworks on anyio (Starlette, FastAPI) when a client goes away."""
    keys = stream_keys("t")
    Writer(client, "t").write(1)

    async def abandon() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in readers.AsyncStream("t", cancel_on_disconnect=True, app=app):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        while not reading.done():
            reading.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while client.hget(keys.asked, "cancel") is None or client.pubsub_channels(keys.channel):
                await asyncio.sleep(0.01)

    asyncio.run(abandon())


def test_a_stream_read_to_its_end_cancels_nothing(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").finish(1)
    read("t", cancel_on_disconnect=True)
    assert client.hget(stream_keys("t").asked, "cancel") is None
