"""Results are stored together, and read as if Celery had stored each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
from billiard.einfo import ExceptionInfo
from celery import Celery, states
from celery.app.task import Context

from petiole.tasks.worker.completion import claims, threads as completions
from petiole.tasks.worker.completion.backend import BACKENDS
from petiole.tasks.worker.completion.completion import FEW_LOGPROBS, Completion
from petiole.tasks.worker.completion.reports import Completed, NeverStored, NotStored, Report
from petiole.tasks.worker.completion.threads import THREADS, Completions, store_together
from petiole.tasks.worker.delivery.delivery import Messages
from petiole.tasks.worker.idempotency import IdempotentCompletion, ServerUnavailable
from petiole.tasks.worker.output.outcomes import Outcome, Success, ended
from tests.support.jobs import RESULT, SUCCESS, delivery_of, nothing
from tests.support.site import RedisServer


@pytest.fixture
def app(server: RedisServer, client: redis.Redis) -> Iterator[Celery]:
    app = Celery("test", set_as_current=False)
    app.loader.override_backends = BACKENDS
    app.conf.update(result_backend=server.url, result_expires=100)
    app.task(nothing, name="tasks.test", shared=False)
    yield app
    app.close()


class Ended:
    """A task that has ended. What Celery's trace does of storing is all that is done for it."""

    def __init__(self, app: Celery, task_id: str, together: Completions) -> None:
        result = {**RESULT, "text": task_id}

        def trace(*_: Any) -> tuple[bool, object, float]:
            app.backend.mark_as_done(task_id, result, Context(id=task_id))
            return False, None, 0.0

        messages = Messages(delivery_of(app, trace, task_id=task_id))
        outcome = Outcome(result, finish_reason="length")
        self.completion = Completion(
            task_id, messages, outcome, replay=False, hard_limit_s=None, tell=self.hear, hand_on=nothing
        )
        self.task_id, self.together, self.parked, self.completed = task_id, together, False, threading.Event()

    def hear(self, report: Report) -> None:
        if isinstance(report, NotStored):
            self.parked = True
            self.together.run_later(partial(self.together.take, self.completion))
        else:
            assert report == Completed(None)
            self.completed.set()


def complete_at_once(app: Celery, number: int) -> list[Ended]:
    """Tasks that end while all threads are busy."""
    together, busy = Completions(app), threading.Event()
    for _ in range(THREADS):
        together.run(busy.wait)
    tasks = [Ended(app, f"task-{i}", together) for i in range(number)]
    for task in tasks:
        together.take(task.completion)
    busy.set()
    for task in tasks:
        assert task.completed.wait(30)
    together.close()
    return tasks


def calls(client: redis.Redis, command: str) -> int:
    return int(client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_it_reads_like_what_celery_stores(app: Celery, client: redis.Redis) -> None:
    context = Context(id="a", group="g", parent_id="p")
    store_together(app.backend, [Success("a", RESULT, context), Success("b", {}, Context(id="b"))])
    app.backend.store_result("celery's", RESULT, states.SUCCESS, request=context)
    ours, stock = (app.backend.get_task_meta(name, cache=False) for name in ("a", "celery's"))
    assert {**ours, "task_id": "", "date_done": ""} == {**stock, "task_id": "", "date_done": ""}
    assert app.AsyncResult("b").get(timeout=5) == {}
    assert 90 < client.ttl(app.backend.get_key_for_task("a")) <= 100


def test_results_need_not_expire(app: Celery, client: redis.Redis) -> None:
    app.conf.result_expires = 0
    store_together(app.backend, [Success("a", RESULT, Context(id="a"))])
    assert client.ttl(app.backend.get_key_for_task("a")) == -1


def test_who_waits_is_told(app: Celery, client: redis.Redis) -> None:
    keys = [app.backend.get_key_for_task(name) for name in ("a", "b")]
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(*keys)
        store_together(app.backend, [Success(name, RESULT, Context(id=name)) for name in ("a", "b")])
        heard = []
        while len(heard) < 2:
            heard += [message["channel"] for message in [pubsub.get_message(timeout=5)] if message]
    assert heard == keys


@pytest.mark.parametrize("state", [states.STARTED, states.RETRY, states.FAILURE, states.SUCCESS])
def test_only_a_success_stays(app: Celery, state: str) -> None:
    before = "before" if state in {states.SUCCESS, states.STARTED} else ValueError("before")
    app.backend.store_result("a", before, state)
    store_together(app.backend, [Success(name, RESULT, Context(id=name)) for name in ("a", "b")])
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


def test_after_a_refusal_a_try_stores_no_failure_in_place_of_the_success(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sent, once = app.backend, [], IdempotentCompletion("a")

    def refuse(*_: object, **__: object) -> None:
        sent.append(1)
        raise redis.ConnectionError("away")

    monkeypatch.setattr(redis.client.Pipeline, "execute", refuse)
    with once.trying():
        with pytest.raises(ServerUnavailable, match="away"):
            backend.mark_as_done("a", RESULT, Context(id="a"))
        monkeypatch.undo()  # it answers again
        with pytest.raises(ServerUnavailable, match="away"):
            backend.mark_as_failure("a", ValueError("not stored"), request=Context(id="a"))
    assert sent == [1], "it is not tried again by sleeping"
    assert backend.get_task_meta("a", cache=False)["status"] == states.PENDING
    with once.trying():
        backend.mark_as_done("a", RESULT, Context(id="a"))
    assert backend.get_task_meta("a", cache=False)["status"] == states.SUCCESS


def test_nothing_is_completed_once_it_is_closed(app: Celery) -> None:
    together = Completions(app)
    together.close()
    task = Ended(app, "late", together)
    together.take(task.completion)
    together.run(task.completed.set)
    assert not task.completed.is_set()


def completion_of(
    app: Celery, outcome: Outcome, hard_limit_s: float | None = None, tell: Any = nothing, **options: Any
) -> Completion:
    messages = Messages(delivery_of(app, **options))
    return Completion("a", messages, outcome, replay=False, hard_limit_s=hard_limit_s, tell=tell, hand_on=nothing)


def test_a_success_alone_is_plain(app: Celery) -> None:
    one = completion_of(app, SUCCESS, group_id="g", errbacks=[app.signature("e")])
    assert one.plain
    task_id, result, context = one.success
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
    assert not completion_of(app, SUCCESS, **options).plain


def test_a_result_that_may_be_large_is_not(app: Celery) -> None:
    few, many = ({**RESULT, "logprobs": [{}] * number} for number in (FEW_LOGPROBS, FEW_LOGPROBS + 1))
    assert completion_of(app, Outcome(few, finish_reason="length")).plain
    assert not completion_of(app, Outcome(many, finish_reason="length")).plain


def test_a_failure_or_a_revocation_is_not(app: Celery) -> None:
    assert not completion_of(app, Outcome(error=ValueError())).plain
    assert not completion_of(app, ended("revoked")).plain


@pytest.mark.parametrize("outcome", [Outcome(error=ValueError()), SUCCESS])
def test_what_the_backend_refuses_is_reported_so(
    app: Celery, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'")

    def trace(*_: object) -> tuple[bool, object, float]:
        app.backend.mark_as_done("a", RESULT)
        return False, None, 0.0

    monkeypatch.setattr(type(app.backend), "_set", refuse)
    (report,) = reports_of(app, outcome, target=trace)
    assert isinstance(report, NotStored)


def reports_of(app: Celery, outcome: Outcome, turns: int = 1, **options: Any) -> list[Report]:
    """What the completion comes to, if it is taken up so often."""
    heard: list[Report] = []
    completion = completion_of(app, outcome, tell=heard.append, **options)
    for _ in range(turns):
        completion.take()
    return heard


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

    def trace(*_: object) -> tuple[bool, object, float]:
        if failing:
            app.backend.mark_as_failure("a", ValueError("no"))
            return True, ExceptionInfo((ValueError, ValueError("no"), None)), 0.0
        app.backend.mark_as_done("a", RESULT)
        return False, None, 0.0

    outcome = Outcome(error=ValueError("no")) if failing else SUCCESS
    (report,) = reports_of(app, outcome, target=trace)
    assert isinstance(report, Completed)
    assert report.failed == failing
    assert app.AsyncResult("a").state == (states.FAILURE if failing else states.SUCCESS)


def test_what_cannot_be_reported_fails_the_task_and_does_not_come_again(app: Celery) -> None:
    """An error callback that nobody can send, of a task that took too long."""

    def report(soft: bool, limit_s: float) -> None:
        raise TypeError("cannot be sent")

    outcome = Outcome(error=ValueError())
    (last,) = reports_of(app, outcome, turns=3, hard_limit_s=5.0, timeout_callback=report)
    assert isinstance(last, Completed)
    assert app.AsyncResult("a").state == states.FAILURE


def test_a_revocation_that_cannot_be_announced_is_stored_as_one(app: Celery) -> None:
    """Its stream says that it was revoked. Celery's stock request, which this is, cannot announce it."""
    (last,) = reports_of(app, ended("revoked"), turns=3)
    assert isinstance(last, Completed)
    assert app.AsyncResult("a").state == states.REVOKED


def test_a_refused_success_is_tried_again(app: Celery) -> None:
    states_met: list[str] = []

    def target(*_: object) -> tuple[bool, object, float]:
        states_met.append(app.AsyncResult("a").state)
        if len(states_met) == 1:
            raise ServerUnavailable(redis.ConnectionError("away"))
        app.backend.mark_as_done("a", RESULT)
        return False, RESULT, 0.0

    refused, completed = reports_of(app, SUCCESS, turns=2, target=target)
    assert isinstance(refused, NotStored)
    assert states_met == [states.PENDING, states.PENDING]
    assert completed == Completed(RESULT)
    assert app.AsyncResult("a").result == RESULT


def test_a_success_that_nobody_could_store_fails(app: Celery) -> None:
    def target(*_: object) -> None:
        raise TypeError("cannot be encoded")

    (report,) = reports_of(app, SUCCESS, target=target)
    assert isinstance(report, Completed)
    assert report.failed
    assert app.AsyncResult("a").state == states.FAILURE
    assert "cannot be encoded" in str(app.AsyncResult("a").result)


def test_what_cannot_even_fail_is_hopeless(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr(claims, "fail", broken)
    (report,) = reports_of(app, SUCCESS, target=broken)
    assert isinstance(report, NeverStored)
