"""How a task has ended, for readers without a result backend; and ids that nobody knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

from petiole import End, StreamError, UnknownTask, aend, end, generate
from petiole.contract.results.outputs import Timing, Usage
from petiole.tasks.fleet.control import state_of
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker.broker.quarantine import Sign, end_stream

USAGE = {"prompt_tokens": 5, "cached_prompt_tokens": 1, "completion_tokens": 2}
TIMING = {"queue_ms": 0.5, "prefill_ms": 1.0, "ttft_ms": None, "total_ms": 9.0}
Ask = Callable[[str], "End | None"]


@pytest.fixture(params=["end", "aend"])
def ask(request: pytest.FixtureRequest, app: Celery) -> Ask:
    return end if request.param == "end" else lambda task_id: asyncio.run(aend(task_id))


def finish(client: redis.Redis, **record: Any) -> None:
    client.hset(stream_keys("t").state, mapping={"attempt": 1, "done": json.dumps(record)})


def test_an_end_has_what_a_client_needs(ask: Ask, client: redis.Redis) -> None:
    finish(
        client, finish_reason="stop", stop_reason="eos", usage=USAGE, timing=TIMING, model="m", attempt=2, new=1
    )
    known = ask("t")
    assert known is not None
    assert (known.finish_reason, known.stop_reason, known.model, known.attempt) == ("stop", "eos", "m", 2)
    assert (known.usage, known.timing) == (Usage(5, 1, 2), Timing(0.5, 1.0, None, 9.0))
    assert known.error is None


def test_an_end_of_the_version_before_has_what_that_wrote(ask: Ask, client: redis.Redis) -> None:
    finish(client, finish_reason="cancelled", stop_reason="revoked")
    assert ask("t") == End(finish_reason="cancelled", stop_reason="revoked")


def test_the_end_of_a_refused_message_has_its_error(ask: Ask, client: redis.Redis) -> None:
    error = {"type": "InvalidRequest", "message": "no", "args": ["a", "b", "c"]}
    assert end_stream(client, "t", 60_000, error, sign=Sign(own=True))
    known = ask("t")
    assert known is not None
    assert (known.finish_reason, known.error) == ("error", error)


def test_a_task_that_runs_has_no_end(ask: Ask, client: redis.Redis) -> None:
    client.hset(stream_keys("t").state, "attempt", 1)
    assert ask("t") is None


def test_an_unknown_id_is_told_from_a_task_that_waits(ask: Ask, app: Celery, client: redis.Redis) -> None:
    def body(*_: object, **__: object) -> None:
        """The body is the worker's."""

    task = app.task(body, base=GenerationTask, name=generate.name, shared=False)
    waits = task.delay(prompt="hello", registered=True)
    assert ask(waits.id) is None
    assert state_of(waits.id, app) == "PENDING"
    named = task.apply_async(kwargs={"prompt": "hello"}, task_id="named", registered=True)
    assert (named.id, ask("named")) == ("named", None)
    with pytest.raises(UnknownTask):
        ask(task.delay(prompt="hello").id)
    with pytest.raises(UnknownTask, match="task nobody's: Redis has nothing of it"):
        ask("nobody's")
    assert client.ttl(stream_keys("named").asked) > 86_400


def test_a_record_that_is_none_is_an_error(ask: Ask, client: redis.Redis) -> None:
    finish(client, finish_reason=5)
    with pytest.raises(StreamError, match="the record of its end cannot be read"):
        ask("t")
