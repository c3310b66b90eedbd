"""What a Celery user expects of a task, and gets from a generation."""

from __future__ import annotations

import json
import time

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from petiole.tasks.fleet import reports
from petiole.tasks.wire.keys import stream_keys
from tests.support.fake_engine import expected
from tests.support.site import Site, Worker, eventually

pytestmark = pytest.mark.usefixtures("worker")
LONG = 3000


def test_a_result_is_the_stream(site: Site) -> None:
    result = site.generate("hello", max_tokens=40, seed=7)
    value = site.get(result)
    assert value["token_ids"] == expected("hello", 7, 40) == site.tokens(result)
    assert value["text"] == "".join(delta["text"] for delta in site.log(result))
    assert (value["finish_reason"], value["attempt"]) == ("length", 1)


def test_sixty_four_tasks_at_once_give_what_each_gives_alone(site: Site) -> None:
    results = {f"p{i}": site.generate(f"p{i}", max_tokens=20, seed=i) for i in range(64)}
    for i, (prompt, result) in enumerate(results.items()):
        assert site.get(result)["token_ids"] == expected(prompt, i, 20)


def test_started_when_it_is_admitted(site: Site) -> None:
    result = site.generate("long", max_tokens=LONG)
    eventually(lambda: result.state == "STARTED", "STARTED")
    assert result.info["hostname"] == "w0@test"
    result.revoke(terminate=True)
    eventually(lambda: result.state == "REVOKED", "REVOKED")


def test_group(site: Site) -> None:
    values = group([site.signature(f"g{i}", max_tokens=3, seed=1) for i in range(5)], app=site.app).apply_async()
    assert [value["token_ids"] for value in site.get(values)] == [expected(f"g{i}", 1, 3) for i in range(5)]


def test_chain_puts_the_text_behind_the_next_prompt(site: Site) -> None:
    result = chain(site.signature("one ", max_tokens=2, seed=1), site.signature("two ", max_tokens=2, seed=1))
    value = site.get(result.apply_async())
    first = "".join(f"w{token} " for token in expected("one ", 1, 2))
    assert value["token_ids"] == expected("two " + first, 1, 2)


def test_chord(site: Site) -> None:
    header = [site.signature(f"c{i}", max_tokens=2, seed=1) for i in range(3)]
    value = site.get(chord(header, app=site.app)(site.signature("sum up: ", max_tokens=2, seed=1)))
    texts = ["".join(f"w{token} " for token in expected(f"c{i}", 1, 2)) for i in range(3)]
    assert value["token_ids"] == expected("sum up: " + "\n".join(texts), 1, 2)


def test_link(site: Site) -> None:
    callback = site.signature("then ", max_tokens=1)
    callback.set(task_id="linked")
    site.get(site.generate("first", max_tokens=1, submission={"link": callback}))
    assert site.get(site.app.AsyncResult("linked"))["finish_reason"] == "length"


def test_link_error(site: Site) -> None:
    errback = site.app.signature("tasks.generate", kwargs={"prompt": "sorry", "max_tokens": 1}, immutable=True)
    errback.set(task_id="consoled")
    failing = site.generate("", submission={"link_error": errback})
    with pytest.raises(ValueError, match="prompt: must not be empty"):
        site.get(failing)
    assert site.get(site.app.AsyncResult("consoled"))["finish_reason"] == "length"


def test_countdown(site: Site) -> None:
    began = time.monotonic()
    site.get(site.generate("later", max_tokens=1, submission={"countdown": 1}))
    assert time.monotonic() - began >= 1


def test_expires_in_the_queue_of_the_broker(site: Site) -> None:
    result = site.generate("too late", max_tokens=1, submission={"countdown": 1, "expires": 0.5})
    with pytest.raises(TaskRevokedError, match="expired"):
        site.get(result)
    eventually(lambda: site.log(result), "the stream ends")
    end = site.log(result)[-1]
    assert (end["finish_reason"], end["stop_reason"]) == ("cancelled", "expired")


def test_expires_while_it_waits_in_the_engine(site: Site) -> None:
    running = [site.generate(f"r{i}", max_tokens=LONG) for i in range(8)]
    for result in running:
        site.streaming(result)
    waiting = site.generate("waits", max_tokens=1, submission={"expires": 0.3})
    expired_at = time.monotonic() + 0.3
    eventually(lambda: time.monotonic() > expired_at, "it has expired")
    for result in running:
        result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        site.get(waiting)


def test_revoke_before_it_starts(site: Site) -> None:
    result = site.generate("never", max_tokens=1, submission={"countdown": 1})
    result.revoke()
    with pytest.raises(TaskRevokedError):
        site.get(result)
    assert site.tokens(result) == []


@pytest.mark.slow
def test_a_revocation_outlives_the_worker_that_holds_its_task_for_its_eta(own_site: Site) -> None:
    first = own_site.worker()
    result = own_site.generate("never", max_tokens=1, submission={"countdown": 60})
    eventually(lambda: f"[{result.id}] received" in first.output, "it waits for its eta")
    result.revoke(terminate=True)
    eventually(lambda: own_site.cancelled(result), "flagged")
    first.stop()


@pytest.mark.slow
def test_a_revocation_is_there_before_its_task_however_long(own_site: Site) -> None:
    first = own_site.worker(PETIOLE_STREAM_TTL_S=1)
    others = [f"other {i}" for i in range(2500)]
    own_site.app.control.revoke([*others, "to come"], terminate=True)
    eventually(lambda: all(own_site.cancelled(one) for one in [*others, "to come"]), "flagged")
    first.kill()
    own_site.redis.set("as long as a stream is kept", 1, ex=1)
    eventually(lambda: not own_site.redis.exists("as long as a stream is kept"), "a stream would have expired")
    own_site.worker()
    result = own_site.generate("hello", max_tokens=5, submission={"task_id": "to come"})
    with pytest.raises(TaskRevokedError):
        own_site.get(result)
    (end,) = own_site.log("to come")
    assert (end["token_ids"], end["finish_reason"], end["stop_reason"]) == ([], "cancelled", "revoked")


def test_revoke_while_it_waits_in_the_engine(site: Site) -> None:
    running = [site.generate(f"q{i}", max_tokens=LONG) for i in range(8)]
    for result in running:
        site.streaming(result)
    waiting = site.generate("queued", max_tokens=1)
    eventually(lambda: site.held() == 9, "the worker holds it")
    waiting.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        site.get(waiting)
    for result in running:
        result.revoke(terminate=True)


def test_revoke_while_it_runs_stops_it_and_ends_its_stream(site: Site) -> None:
    result = site.generate("running", max_tokens=LONG)
    site.streaming(result, 5)
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        site.get(result)
    eventually(lambda: site.log(result)[-1]["finish_reason"] == "cancelled", "the last delta")
    assert 5 <= len(site.tokens(result)) < LONG
    eventually(lambda: site.held() == 0, "acknowledged")
    assert result.state == "REVOKED"


def test_soft_time_limit_gives_a_partial_result(site: Site) -> None:
    value = site.get(site.generate("soft", max_tokens=LONG, submission={"soft_time_limit": 0.3}))
    assert value["finish_reason"] == "deadline"
    assert 0 < len(value["token_ids"]) < LONG


def test_hard_time_limit_fails(site: Site) -> None:
    result = site.generate("hard", max_tokens=LONG, submission={"time_limit": 0.3})
    with pytest.raises(TimeLimitExceeded):
        site.get(result)
    assert site.log(result)[-1]["finish_reason"] == "deadline"


def test_a_limit_of_zero_is_none(site: Site) -> None:
    value = site.get(site.generate("no limit", max_tokens=2, submission={"time_limit": 0, "soft_time_limit": 0}))
    assert value["finish_reason"] == "length"


def test_time_limits_may_be_changed_while_the_worker_runs(site: Site) -> None:
    def limit(soft: float | None) -> None:
        (reply,) = site.app.control.time_limit("tasks.generate", soft=soft, reply=True, timeout=10, limit=1)
        assert "ok" in reply["w0@test"]

    limit(0.3)
    value = site.get(site.generate("soft", max_tokens=LONG))
    own = site.get(site.generate("own", max_tokens=200, submission={"soft_time_limit": 60}))
    limit(None)
    assert (value["finish_reason"], own["finish_reason"]) == ("deadline", "length")
    assert site.get(site.generate("free", max_tokens=200))["finish_reason"] == "length"


def test_the_requests_own_deadline(site: Site) -> None:
    assert site.get(site.generate("asked", max_tokens=LONG, deadline_s=0.3))["finish_reason"] == "deadline"


def test_inspect_ping_active_and_stats(site: Site) -> None:
    result = site.generate("seen", max_tokens=LONG)
    site.streaming(result)
    inspect = site.app.control.inspect(timeout=10, limit=1)
    assert inspect.ping() == {"w0@test": {"ok": "pong"}}
    assert [task["id"] for task in inspect.active()["w0@test"]] == [result.id]
    pool = inspect.stats()["w0@test"]["pool"]
    assert (pool["max-concurrency"], pool["engine"]["running"]) == (12, 1)
    result.revoke(terminate=True)
    eventually(lambda: result.state == "REVOKED", "REVOKED")


def test_ignored_results_are_not_stored(site: Site) -> None:
    result = site.generate("quiet", max_tokens=2, submission={"ignore_result": True})
    eventually(lambda: site.log(result) and site.log(result)[-1]["finish_reason"], "the stream ends")
    assert site.app.backend.get_task_meta(result.id)["status"] == "PENDING"


@pytest.mark.slow
def test_prefixes_of_all_keys_of_broker_and_results(own_site: Site) -> None:
    prefix = {"global_keyprefix": "mine:"}
    named = {"broker_transport_options": prefix, "result_backend_transport_options": prefix}
    own_site.app.conf.update(named)
    said = [f"{name.replace('_', '.', 1)}=(dict){json.dumps(value)}" for name, value in named.items()]
    first = own_site.worker("--", *said)
    own_site.get(own_site.generate("hello", max_tokens=2), 20)
    eventually(lambda: not own_site.redis.keys("mine:petiole:unacked:*"), "its acknowledgement deletes it")
    result = own_site.generate("hello", max_tokens=900, seed=1)
    own_site.streaming(result)
    first.kill()
    last = own_site.worker("--", *said)
    value = own_site.get(result, 20)
    assert (value["token_ids"], value["attempt"]) == (expected("hello", 1, 900), 2)
    assert own_site.redis.exists(f"mine:celery-task-meta-{result.id}")
    assert "lease was lost" not in first.output + last.output


def test_a_task_id_of_ones_own(site: Site) -> None:
    assert site.get(site.generate("mine", max_tokens=1, submission={"task_id": "my-own-id"}))
    assert site.tokens("my-own-id")


def test_the_fleet_view_shows_the_worker(site: Site, worker: Worker) -> None:
    (report,) = eventually(lambda: reports.workers(site.redis), "a report")
    assert (report.worker, report.state, report.slots, report.lost) == ("w0@test", "ready", 8, False)


def test_cancelling_by_the_flag_ends_a_running_task(site: Site) -> None:
    result = site.generate("flagged", max_tokens=LONG)
    site.streaming(result)
    site.redis.hset(stream_keys(result.id).asked, "cancel", 1)
    with pytest.raises(TaskRevokedError):
        site.get(result)
    assert site.log(result)[-1]["finish_reason"] == "cancelled"


def test_nothing_stays_behind(site: Site, worker: Worker) -> None:
    eventually(lambda: site.held() == 0, "all acknowledged")
    assert site.queued() == 0
    assert site.without_ttl() <= {"petiole:owners"}
    assert worker.alive()
