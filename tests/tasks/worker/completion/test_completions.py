"""Results are stored together, and read as if Celery had stored each."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery, states
from celery.app.task import Context
from celery.worker.request import Request
from kombu.message import Message
from kombu.serialization import dumps

from petiole.tasks.app.application import BACKENDS
from petiole.tasks.worker.completion import threads as completions
from petiole.tasks.worker.completion.threads import THREADS, Completions, store_together
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.generation.job import FEW_LOGPROBS, Job
from petiole.tasks.worker.output.outcomes import Outcome, ended
from tests.support.site import RedisServer

RESULT = {"text": "some", "token_ids": [1, 2], "finish_reason": "length"}


@pytest.fixture
def app(server: RedisServer, client: redis.Redis) -> Iterator[Celery]:
    app = Celery("test", set_as_current=False)
    app.loader.override_backends = BACKENDS
    app.conf.update(result_backend=server.url, result_expires=100)
    app.task(nothing, name="tasks.test", shared=False)
    yield app
    app.close()


def nothing() -> None: ...


class EndedJob:
    """What Celery's trace does of storing, and nothing else."""

    plain = True
    together: Completions

    def __init__(self, app: Celery, task_id: str) -> None:
        self.app, self.task_id, self.completed = app, task_id, threading.Event()
        self.success = task_id, {**RESULT, "text": task_id}, Context(id=task_id)

    parked = False

    def park(self, reason: BaseException, again: Callable[[], object]) -> None:
        self.parked = True
        self.together.run_later(again)

    def complete(self) -> None:
        self.app.backend.mark_as_done(*self.success)
        self.completed.set()


def complete_at_once(app: Celery, number: int) -> list[EndedJob]:
    """Jobs that end while all threads are busy."""
    together, busy = Completions(app), threading.Event()
    for _ in range(THREADS):
        together.run(busy.wait)
    jobs = [EndedJob(app, f"task-{i}") for i in range(number)]
    for job in jobs:
        job.together = together
        together.complete(job)  # type: ignore[arg-type]
    busy.set()
    for job in jobs:
        assert job.completed.wait(30)
    together.close()
    return jobs


def calls(client: redis.Redis, command: str) -> int:
    return int(client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_it_reads_like_what_celery_stores(app: Celery, client: redis.Redis) -> None:
    context = Context(id="a", group="g", parent_id="p")
    store_together(app.backend, [("a", RESULT, context), ("b", {}, Context(id="b"))])
    app.backend.store_result("celery's", RESULT, states.SUCCESS, request=context)
    ours, stock = (app.backend.get_task_meta(name, cache=False) for name in ("a", "celery's"))
    assert {**ours, "task_id": "", "date_done": ""} == {**stock, "task_id": "", "date_done": ""}
    assert app.AsyncResult("b").get(timeout=5) == {}
    assert 90 < client.ttl(app.backend.get_key_for_task("a")) <= 100


def test_results_need_not_expire(app: Celery, client: redis.Redis) -> None:
    app.conf.result_expires = 0
    store_together(app.backend, [("a", RESULT, Context(id="a"))])
    assert client.ttl(app.backend.get_key_for_task("a")) == -1


def test_who_waits_is_told(app: Celery, client: redis.Redis) -> None:
    keys = [app.backend.get_key_for_task(name) for name in ("a", "b")]
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(*keys)
        store_together(app.backend, [(name, RESULT, Context(id=name)) for name in ("a", "b")])
        heard = []
        while len(heard) < 2:
            heard += [message["channel"] for message in [pubsub.get_message(timeout=5)] if message]
    assert heard == keys


@pytest.mark.parametrize("state", [states.STARTED, states.RETRY, states.FAILURE, states.SUCCESS])
def test_only_a_success_stays(app: Celery, state: str) -> None:
    before = "before" if state in {states.SUCCESS, states.STARTED} else ValueError("before")
    app.backend.store_result("a", before, state)
    store_together(app.backend, [("a", RESULT, Context(id="a")), ("b", RESULT, Context(id="b"))])
    meta = app.backend.get_task_meta("a", cache=False)
    assert meta["status"] == states.SUCCESS
    assert meta["result"] == ("before" if state == states.SUCCESS else RESULT)
    assert app.AsyncResult("b").result == RESULT


def test_what_ends_together_costs_a_few_calls(app: Celery, client: redis.Redis) -> None:
    app.AsyncResult("none").state  # noqa: B018 - connects
    before = {command: calls(client, command) for command in ("mget", "get", "setex", "exec")}
    jobs = complete_at_once(app, 40)
    assert all(app.backend.get_task_meta(job.task_id)["result"]["text"] == job.task_id for job in jobs)
    assert calls(client, "mget") - before["mget"] <= 6
    assert calls(client, "exec") == before["exec"]
    assert calls(client, "setex") == before["setex"]


def test_what_cannot_be_stored_together_is_stored_by_celery(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("one of them cannot be encoded")

    monkeypatch.setattr(completions, "store_together", fail)
    jobs = complete_at_once(app, 20)
    assert all(app.backend.get_task_meta(job.task_id)["result"]["text"] == job.task_id for job in jobs)


def test_what_the_backend_refuses_together_is_stored_together_later(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[int] = []

    def refuse(backend: Any, successes: Any) -> None:
        if not refusals:
            refusals.append(len(successes))
            raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'")
        store_together(backend, successes)

    monkeypatch.setattr(completions, "store_together", refuse)
    monkeypatch.setattr(completions, "LATER_S", 0.01)
    jobs = complete_at_once(app, 20)
    assert sum(job.parked for job in jobs) == refusals[0]
    assert all(app.backend.get_task_meta(job.task_id)["result"]["text"] == job.task_id for job in jobs)


def test_once_a_result_is_refused_celery_stores_no_failure_in_its_place(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sent = app.backend, []

    def refuse(*_: object, **__: object) -> None:
        sent.append(1)
        raise redis.ConnectionError("away")

    monkeypatch.setattr(backend, "_store_result", refuse)
    with backend.trying_once():
        with pytest.raises(redis.ConnectionError):
            backend.mark_as_done("a", RESULT, Context(id="a"))
        monkeypatch.undo()  # it answers again
        with pytest.raises(redis.ConnectionError):
            backend.mark_as_failure("a", ValueError("not stored"), request=Context(id="a"))
    assert sent == [1], "it is not tried again by sleeping"
    assert backend.get_task_meta("a", cache=False)["status"] == states.PENDING
    backend.mark_as_done("a", RESULT, Context(id="a"))
    assert backend.get_task_meta("a", cache=False)["status"] == states.SUCCESS


def test_nothing_is_completed_once_it_is_closed(app: Celery) -> None:
    together = Completions(app)
    together.close()
    job = EndedJob(app, "late")
    together.complete(job)  # type: ignore[arg-type]
    together.run(job.complete)
    assert not job.completed.is_set()


def job_of(app: Celery, outcome: Outcome, **options: Any) -> Job:
    """A job as the pool makes one, of a message as `apply_async` with `options` makes it."""
    sent = app.amqp.as_task_v2("a", "tasks.test", (), {}, **options)
    content_type, encoding, body = dumps(sent.body, "json")
    message = Message(
        body=body,
        headers=sent.headers,
        content_type=content_type,
        content_encoding=encoding,
        properties=sent.properties,
        delivery_info={},
    )
    request = Request(message, app=app, task=app.tasks["tasks.test"])
    delivery = Delivery(
        lambda: None, ("tasks.test", "a", {}), request.on_accepted, request.on_success, lambda *_: None, None, None
    )
    job = Job(SimpleNamespace(), delivery)  # type: ignore[arg-type]
    job.outcome = outcome
    return job


def test_a_success_alone_is_plain(app: Celery) -> None:
    job = job_of(app, Outcome(RESULT, finish_reason="length"), group_id="g", errbacks=[app.signature("e")])
    assert job.plain
    task_id, result, context = job.success
    assert (task_id, result, context.group) == ("a", RESULT, "g")


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [{"task": "next"}]},
        {"chain": [{"task": "next"}]},
        {"chord": {"task": "body"}},
        {"ignore_result": True},
    ],
)
def test_what_has_more_to_do_than_to_store_is_not(app: Celery, options: dict[str, Any]) -> None:
    assert not job_of(app, Outcome(RESULT, finish_reason="length"), **options).plain


def test_a_result_that_may_be_large_is_not(app: Celery) -> None:
    few, many = ({**RESULT, "logprobs": [{}] * number} for number in (FEW_LOGPROBS, FEW_LOGPROBS + 1))
    assert job_of(app, Outcome(few, finish_reason="length")).plain
    assert not job_of(app, Outcome(many, finish_reason="length")).plain


def test_a_failure_or_a_revocation_is_not(app: Celery) -> None:
    assert not job_of(app, Outcome(error=ValueError())).plain
    assert not job_of(app, ended("revoked")).plain


@pytest.mark.parametrize("outcome", [Outcome(error=ValueError()), Outcome(RESULT, finish_reason="length")])
def test_what_the_backend_refuses_is_not_acknowledged(
    app: Celery, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'")

    monkeypatch.setattr(type(app.backend), "_set", refuse)
    job = job_of(app, outcome)
    posted, parked = in_hand(job)
    job.complete()
    assert (posted, len(parked)) == ([], 1)


def in_hand(job: Job) -> tuple[list[Any], list[Callable[[], object]]]:
    """What is posted to the consumer's thread, and what is parked; other threads do their work at once."""
    posted: list[Any] = []
    parked: list[Callable[[], object]] = []
    job.pool = SimpleNamespace(  # type: ignore[assignment]
        mailbox=SimpleNamespace(post=posted.append),
        completions=SimpleNamespace(run_later=parked.append, run=lambda work: work()),
    )
    return posted, parked


NO_RESULTS = [b"junk", b"5", b"null", b"[]", b"{}", b'{"status": []}', b'{"status": "FAILURE", "result": 5}']


@pytest.mark.parametrize("damage", [*NO_RESULTS, ["a list"]], ids=str)
@pytest.mark.parametrize("failing", [False, True])
def test_what_lies_in_place_of_a_result_is_written_anew(
    app: Celery, client: redis.Redis, damage: bytes | list[str], failing: bool
) -> None:
    key = app.backend.get_key_for_task("a")
    if isinstance(damage, list):
        client.rpush(key, *damage)
    else:
        client.set(key, damage)
    job = job_of(app, Outcome(error=ValueError("no")) if failing else Outcome(RESULT, finish_reason="length"))

    def trace(*_: object) -> tuple[bool, object, float]:
        if failing:
            app.backend.mark_as_failure("a", ValueError("no"))
        else:
            app.backend.mark_as_done("a", RESULT)
        return failing, None, 0.0

    job.delivery = dataclasses.replace(job.delivery, target=trace)
    posted, parked = in_hand(job)
    job.complete()
    assert (len(posted), parked) == (1, [])
    assert app.AsyncResult("a").state == (states.FAILURE if failing else states.SUCCESS)


def test_what_cannot_be_reported_fails_the_task_and_does_not_come_again(app: Celery) -> None:
    """An error callback that nobody can send, of a task that took too long."""

    def report(soft: bool, limit_s: float) -> None:
        raise TypeError("cannot be sent")

    job = job_of(app, Outcome(error=ValueError()))
    job.delivery = dataclasses.replace(job.delivery, timeout_callback=report)
    posted, parked = in_hand(job)
    job._time_out(5.0)
    assert app.AsyncResult("a").state == states.FAILURE
    assert (len(posted), parked) == (1, [])
    assert job._requeue_later not in posted


@pytest.mark.parametrize("error", [redis.ConnectionError("away"), TypeError("cannot be encoded")], ids=type)
def test_a_refused_success_is_parked_and_stored_later_and_one_that_nobody_could_store_fails(
    app: Celery, error: Exception
) -> None:
    def target(*_: object) -> None:
        raise error

    job = job_of(app, Outcome(RESULT, finish_reason="length"))
    job.delivery = dataclasses.replace(job.delivery, target=target)
    posted, parked = in_hand(job)
    job.complete()
    if isinstance(error, TypeError):
        assert app.AsyncResult("a").state == states.FAILURE
        assert "cannot be encoded" in str(app.AsyncResult("a").result)
    else:
        (again,) = parked
        assert (posted, app.AsyncResult("a").state) == ([], states.PENDING)
        again()
        assert app.AsyncResult("a").result == RESULT
    assert len(posted) == 1
    assert job._requeue_later not in posted
