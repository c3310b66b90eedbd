"""Petiole on RabbitMQ: the broker keeps the messages, Redis the streams and the results."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.queues import queue_lengths
from petiole.tasks.fleet.reports import LOST_AFTER_S
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import QUARANTINE_KEY
from tests.e2e.test_stories import entries, petiole, put_aside
from tests.support.client import client
from tests.support.fake_engine import expected, word
from tests.support.rabbitmq import INSTALLED, RabbitServer, site_on
from tests.support.scraping import exporting
from tests.support.site import Site, eventually

pytestmark = pytest.mark.skipif(not INSTALLED, reason="rabbitmq-server is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    server = RabbitServer(tmp_path_factory.mktemp("rabbit"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def rabbit(server: RabbitServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_on(server, tmp_path_factory.mktemp("site"), PETIOLE_DRAIN_SECONDS=0) as site:
        for worker in [site.start_worker("-Q", "petiole,petiole.other") for _ in range(2)]:
            worker.ready()
        yield site


def test_a_result_is_the_stream(rabbit: Site) -> None:
    result = rabbit.generate("hello", max_tokens=20, seed=1)
    assert rabbit.get(result)["token_ids"] == rabbit.tokens(result) == expected("hello", 1, 20)


def test_workers_answer_control_commands(rabbit: Site) -> None:
    answers = rabbit.app.control.ping(timeout=30, limit=2)
    assert sorted(name for answer in answers for name in answer) == sorted(
        worker.node for worker in rabbit.workers
    )


def test_a_count_is_answered_from_its_own_queue(rabbit: Site) -> None:
    counted = rabbit.app.send_task("tasks.count", kwargs={"texts": ["one two three"]}, queue="petiole.count")
    assert rabbit.get(counted)["counts"] == [3]


def test_many_at_once(rabbit: Site) -> None:
    results = [rabbit.generate(f"r{i}", max_tokens=10, seed=i) for i in range(60)]
    for i, result in enumerate(results):
        assert rabbit.get(result)["token_ids"] == expected(f"r{i}", i, 10)


@pytest.mark.parametrize(
    ("changes", "body", "says"),
    [
        ({"timelimit": 5}, [[], {}, {}], "timelimit"),
        ({"expires": 60}, [[], {}, {}], "headers.expires must be a time"),
        ({"compression": "nope"}, [[], {}, {}], "headers.compression must be"),
        ({"compression": "gzip"}, [[], {}, {}], "body cannot be decoded"),
        ({}, [[], {}, {"_children": 5}], "body.embed"),
        ({}, 5, "body must be"),
    ],
)
def test_a_bad_message_does_not_end_the_worker(
    rabbit: Site, changes: dict[str, Any], body: object, says: str
) -> None:
    task_id = f"bad-{uuid4()}"
    with rabbit.app.connection_for_write() as connection:
        producer = connection.Producer(serializer="json")
        headers = {"task": "tasks.generate", "id": task_id, **changes}
        producer.publish(body, routing_key="petiole", headers=headers)
    with pytest.raises(ValueError, match=says):
        rabbit.get(rabbit.app.AsyncResult(task_id))
    assert all(worker.alive() for worker in rabbit.workers)


def test_a_header_that_would_replace_celerys_own_does_no_harm(rabbit: Site) -> None:
    result = rabbit.generate("hello", max_tokens=2, seed=1, submission={"headers": {"_children": 5, "get": 5}})
    assert rabbit.get(result)["token_ids"] == expected("hello", 1, 2)


@pytest.mark.parametrize("compression", ["gzip", "bzip2", "lzma"])
def test_a_compressed_task_runs(rabbit: Site, compression: str) -> None:
    result = rabbit.generate("hello " * 1000, max_tokens=2, seed=1, submission={"compression": compression})
    assert rabbit.get(result)["token_ids"] == expected("hello " * 1000, 1, 2)


@pytest.mark.parametrize(
    ("exchange_type", "error"), [("direct", "PreconditionFailed"), ("nope", "InvalidCommand")]
)
def test_a_queue_that_rabbitmq_refuses_is_forgotten(rabbit: Site, exchange_type: str, error: str) -> None:
    """RabbitMQ closes the channel (the exchange has another type) or the connection (there is no such type)."""
    refused = {"queue": "refused", "exchange": "petiole", "exchange_type": exchange_type}
    says = f"cannot consume from the queue 'refused': {error}"
    rabbit.app.control.broadcast("add_consumer", arguments=refused)
    for worker in rabbit.workers:
        eventually(lambda worker=worker: says in worker.output, "it is refused")
    test_many_at_once(rabbit)
    answers = eventually(lambda: rabbit.app.control.inspect().active_queues(), "they answer")
    assert not [queue for queues in answers.values() for queue in queues if queue["name"] == "refused"]


@pytest.mark.parametrize("queue", ["petiole", "petiole.other"])
def test_tasks_for_later_do_not_block_a_worker(rabbit: Site, queue: str) -> None:
    """They wait in RabbitMQ: a consumer of a quorum queue cannot hold more than its first prefetch count."""
    for i in range(100):
        later = {"queue": queue, "countdown": 3600, "ignore_result": True}
        rabbit.generate(f"l{i}", max_tokens=1, submission=later)
    behind = rabbit.generate("behind", max_tokens=2, seed=1, submission={"queue": queue})
    assert rabbit.get(behind)["token_ids"] == expected("behind", 1, 2)


@pytest.fixture
def quarantine(rabbit: Site) -> Iterator[Site]:
    """A site whose quarantine is empty: the messages of other tests have left it."""
    rabbit.redis.delete(QUARANTINE_KEY)
    yield rabbit
    rabbit.redis.delete(QUARANTINE_KEY)


def test_a_refused_message_ends_nobody_elses_task(quarantine: Site) -> None:
    running = quarantine.generate("steady", max_tokens=300, seed=1)
    quarantine.streaming(running)
    refused = {"task_id": running.id, "headers": {"retries": "many"}}
    quarantine.generate("another", max_tokens=2, submission=refused)
    eventually(lambda: entries(quarantine), "it is put aside")
    assert quarantine.get(running)["token_ids"] == quarantine.tokens(running) == expected("steady", 1, 300)


def test_a_refused_message_is_sent_again_to_the_queue_it_was_taken_from(quarantine: Site) -> None:
    """One for later has come by exchanges, with a routing key of theirs."""
    late = {"countdown": 1, "headers": {"retries": "many"}}
    refused = quarantine.generate("late", max_tokens=2, submission=late)
    with pytest.raises(InvalidRequest):
        quarantine.get(refused)
    [first] = entries(quarantine)
    assert first["queue"] == "petiole"
    assert petiole(quarantine, "replay", "--all") == (0, f"{refused.id}: sent again to petiole\n")
    eventually(lambda: [one for one in entries(quarantine) if one["at"] > first["at"]], "refused again")


def test_a_message_that_no_queue_takes_stays_in_quarantine(
    quarantine: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    rabbit = quarantine
    monkeypatch.setitem(rabbit.environment, "PETIOLE_QUEUE", "petiole.nobody")  # known, and not declared
    message = json.dumps({"headers": {}, "properties": {}, "body": "[]"})
    put_aside(rabbit, None, message, queue="petiole.nobody")
    put_aside(rabbit, None, message)
    status, shown = petiole(rabbit, "replay", "--all")
    assert (status, "NO_ROUTE" in shown, "sent again to petiole\n" in shown) == (1, True, True), shown
    assert "petiole.nobody" in [one["queue"] for one in entries(rabbit)]


@pytest.mark.parametrize("countdown", [0.001, 0.5, 1.5])
def test_a_task_for_later_comes_then(rabbit: Site, countdown: float) -> None:
    submitted = time.time()
    eta = datetime.fromtimestamp(submitted + countdown, UTC)
    for submission in ({"countdown": countdown}, {"eta": eta}, {"eta": eta.isoformat()}):
        rabbit.get(rabbit.generate("later", max_tokens=2, seed=1, submission=submission))
        assert time.time() >= submitted + countdown


def test_the_length_of_a_queue(rabbit: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_QUEUE", "elsewhere")
    settings.cache_clear()
    try:
        assert queue_lengths(rabbit.app) == {("elsewhere", None): 0}
        rabbit.generate("waits", submission={"queue": "elsewhere"})
        eventually(lambda: queue_lengths(rabbit.app) == {("elsewhere", None): 1}, "it is counted")
    finally:
        settings.cache_clear()


def test_what_expires_or_is_revoked_in_the_queue_is_revoked(rabbit: Site) -> None:
    """The broker would drop a message with a time to live, and nobody would tell the caller."""
    blockers = [rabbit.generate("blocker", max_tokens=3000) for _ in range(2 * 8)]
    for blocker in blockers:
        rabbit.streaming(blocker)
    waiting = [rabbit.generate("expires", submission={"expires": 0.001}) for _ in range(30)]
    waiting += [rabbit.generate("revoked") for _ in range(30)]
    for result in waiting[30:]:
        result.revoke()
    for result in blockers:
        result.revoke(terminate=True)
    for result in waiting:
        with pytest.raises(TaskRevokedError):
            rabbit.get(result)


def test_an_app_with_quorum_queues_of_its_own(rabbit: Site, server: RabbitServer) -> None:
    """How its queue was declared nobody asks: Petiole's worker sends to it as it is."""
    quorum = {
        "result_backend": rabbit.url,
        "task_default_queue_type": "quorum",
        "task_default_exchange_type": "topic",
        "task_create_missing_queue_type": "quorum",
        "task_create_missing_queue_exchange_type": "topic",
    }
    rabbit.environment |= {"SHOP_URL": server.url, "SHOP_SETTINGS": json.dumps(quorum)}
    shop = rabbit.start_worker("-P", "solo", "-c", "1", app="tests.support.shop")
    shop.ready()
    try:
        canvas = (
            "[canvas.apply_async().get(timeout=60) for canvas in ("
            "generate.s(prompt='Summarize: article 3', max_tokens=4, seed=1) | send_digest.s(), digest,"
            "generate.s(prompt='a', max_tokens=1) | fetch_article.si(3)"
            " | generate.s(prompt='Summarize: ', max_tokens=4, seed=1) | send_digest.s())]"
        )
        texts = ["".join(map(word, expected("Summarize: article 3", 1, 4)))]
        shown = client(rabbit, f"print(json.dumps({canvas}))", "from tests.support.shop import *")
        assert shown == [{"texts": texts}] * 3
    finally:
        shop.kill()
        rabbit.workers.remove(shop)


def generations(rabbit: Site, name: str) -> list[AsyncResult]:
    """More than two workers hold; some of them stream."""
    results = [rabbit.generate(f"{name}{i}", max_tokens=600, seed=i) for i in range(30)]
    for result in results[:4]:
        rabbit.streaming(result, 5)
    return results


def complete(rabbit: Site, name: str, results: list[AsyncResult]) -> None:
    for i, result in enumerate(results):
        assert rabbit.get(result)["token_ids"] == rabbit.tokens(result) == expected(f"{name}{i}", i, 600)


@pytest.mark.slow
def test_a_restart_of_the_broker_loses_and_doubles_nothing(rabbit: Site, server: RabbitServer) -> None:
    results = generations(rabbit, "r")
    server.stop()
    server.start()
    complete(rabbit, "r", results)
    assert all(worker.alive() for worker in rabbit.workers)


@pytest.mark.slow
def test_a_deploy_hands_over(rabbit: Site) -> None:
    results = generations(rabbit, "d")
    old = rabbit.workers[0]
    old.signal(signal.SIGTERM)
    rabbit.worker("-Q", "petiole,petiole.other")
    complete(rabbit, "d", results)
    assert old.ended() == 0


def test_a_killed_workers_tasks_go_on_elsewhere_and_the_metrics_say_so(rabbit: Site) -> None:
    results = [rabbit.generate(f"k{i}", max_tokens=600, seed=i) for i in range(6)]
    for result in results:
        rabbit.streaming(result, 5)
    dead = rabbit.workers[-1]
    dead.kill()
    for i, result in enumerate(results):
        assert rabbit.get(result)["token_ids"] == rabbit.tokens(result) == expected(f"k{i}", i, 600)
    with exporting(rabbit) as scrape:
        rabbit.redis.hdel("petiole:workers", dead.node)
        resumed = ("petiole_resumed_attempts_total", "")
        figures = eventually(lambda: (now := scrape()).get(resumed) and now, "they are reported")
        assert figures["petiole_redeliveries_total", ""] >= figures[resumed]


def test_what_a_worker_holds_is_reported_and_that_its_engine_lives(rabbit: Site) -> None:
    """RabbitMQ has no leases to be renewed."""
    for worker in rabbit.workers[:-1]:
        if worker.alive() and len([one for one in rabbit.workers if one.alive()]) > 1:
            worker.stop()
    with exporting(rabbit) as scrape:
        result = rabbit.generate("long", max_tokens=4000)
        held = ("petiole_num_held_messages", "")
        figures = eventually(lambda: (now := scrape()).get(held) == 1 and now, "it is held")
        assert figures["petiole_lease_age_seconds", ""] < LOST_AFTER_S
    result.revoke(terminate=True)


@pytest.mark.slow
def test_a_message_held_for_longer_than_rabbitmq_allows_comes_back(tmp_path: Path) -> None:
    """RabbitMQ closes the channel after `consumer_timeout`. The worker goes on with its generation."""
    server = RabbitServer(tmp_path, "-rabbit consumer_timeout 2000 -rabbit channel_tick_interval 500")
    try:
        with site_on(server, tmp_path, PETIOLE_FAKE_STEP_MS=20) as site:
            worker = site.worker()
            results = [site.generate(f"long{i}", max_tokens=400, seed=i) for i in range(3)]
            eventually(lambda: "the broker has closed a channel" in worker.output, "RabbitMQ closes the channel")
            for i, result in enumerate(results):
                assert site.get(result)["token_ids"] == site.tokens(result) == expected(f"long{i}", i, 400)
            assert worker.alive()
            assert site.get(site.generate("short", max_tokens=2, seed=1))["attempt"] == 1
    finally:
        server.close()
