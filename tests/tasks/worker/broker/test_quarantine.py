"""The quarantine: whoever puts a message aside never waits, and the message is acknowledged when all is stored."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import BackendStoreError

from petiole.tasks.wire.keys import LedgerKeys, stream_keys
from petiole.tasks.worker.broker import corruption, quarantine as module
from petiole.tasks.worker.broker.ledger import Ledger, sweep
from petiole.tasks.worker.broker.quarantine import Quarantine, Sign, put_aside
from petiole.tasks.worker.completion.backend import BACKENDS
from tests.support.site import eventually


class Backend:
    """A result backend that can hang or fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.errors: list[Exception] = []
        self.failed: list[str] = []

    def mark_as_failure(self, task_id: str, error: Exception) -> None:
        assert self.open.wait(60)
        if self.errors:
            raise self.errors.pop(0)
        self.failed.append(task_id)


class Aside:
    """A quarantine whose thread runs, with a real Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self.client, self.backend, self.quarantine = client, Backend(), Quarantine()
        self.acknowledged: list[str] = []

    def start(self) -> None:
        self.quarantine.start(SimpleNamespace(backend=self.backend), lambda callback: callback())

    def put(self, task_id: str | None, **options: Any) -> None:
        done: Callable[[], object] = lambda: self.acknowledged.append(task_id or "")  # noqa: E731
        put_aside(b'{"some": "message"}', "petiole", "why", task_id, done=done, **options)

    @property
    def entries(self) -> list[str | None]:
        stored = self.client.lrange("petiole:quarantine", 0, -1)
        return [json.loads(entry)["task_id"] for entry in reversed(stored)]


@pytest.fixture
def aside(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aside]:
    aside = Aside(client)
    monkeypatch.setattr(module, "quarantine", aside.quarantine)
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module.connections, "streams", lambda: client)
    yield aside
    aside.backend.open.set()
    aside.quarantine.close()


def test_a_message_is_entered_its_task_failed_and_its_stream_ended_before_it_is_acknowledged(
    aside: Aside, client: redis.Redis
) -> None:
    aside.start()
    aside.put("a")
    aside.put(None)
    eventually(lambda: aside.acknowledged == ["a", ""], "acknowledged")
    assert aside.entries == ["a", None]
    assert aside.backend.failed == ["a"]
    last = json.loads(client.lindex(stream_keys("a").log, -1))
    assert (last["finish_reason"], last["error"]["type"]) == ("error", "InvalidRequest")


def test_nobody_waits_for_a_result_backend_that_is_away(aside: Aside) -> None:
    aside.backend.open.clear()
    aside.start()
    for task_id in "abc":
        aside.put(task_id)  # returns, although the backend does not
    eventually(lambda: aside.entries == ["a"], "it is at the first")
    assert aside.acknowledged == []
    aside.backend.open.set()
    eventually(lambda: aside.acknowledged == ["a", "b", "c"], "all are acknowledged")


def test_celerys_pauses_between_its_own_tries_hold_up_nothing(aside: Aside, tmp_path: Path) -> None:
    app = Celery("test", set_as_current=False)
    app.loader.override_backends = BACKENDS
    app.conf.update(result_backend=f"redis+socket://{tmp_path}/nobody.sock", result_backend_always_retry=True)
    app.conf.result_backend_base_sleep_between_retries_ms = 10**6
    aside.quarantine.start(app, lambda callback: callback())
    aside.put("a")
    aside.put(None)
    eventually(lambda: aside.acknowledged == [""], "the other is acknowledged")
    assert set(aside.entries) == {"a", None}


@pytest.mark.parametrize("error", [BackendStoreError("away"), redis.ConnectionError("away"), OSError("away")])
def test_what_could_not_be_stored_is_tried_again_and_entered_once(aside: Aside, error: Exception) -> None:
    aside.backend.errors = [error] * 3
    aside.start()
    aside.put("a")
    eventually(lambda: aside.acknowledged == ["a"], "acknowledged")
    assert aside.backend.failed == aside.entries == ["a"]


def test_what_can_never_be_stored_keeps_nothing_else_from_it(aside: Aside, client: redis.Redis) -> None:
    client.set("petiole:quarantine", "somebody's")
    aside.backend.errors = [ValueError("not this one")]
    aside.start()
    aside.put("a")
    aside.put("b")
    eventually(lambda: aside.acknowledged == ["a", "b"], "acknowledged")
    assert aside.backend.failed == ["b"]


def test_a_shutdown_says_what_is_left(aside: Aside, caplog: pytest.LogCaptureFixture) -> None:
    aside.backend.open.clear()
    aside.start()
    aside.put("a")
    eventually(lambda: aside.entries == ["a"], "it is at the first")
    aside.quarantine.close(timeout_s=0.01)
    assert "could not be put aside, and goes back to its queue" in caplog.text
    assert aside.acknowledged == []


def test_no_more_wait_than_memory_has_room_for(
    aside: Aside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAITING", 2)
    for task_id in "abc":
        aside.put(task_id)
    assert "2 others wait" in caplog.text
    aside.start()
    eventually(lambda: aside.acknowledged == ["a", "b"], "the others are acknowledged")


def test_even_what_is_no_message_at_all_raises_nothing(aside: Aside) -> None:
    put_aside(None, "petiole", "why")  # type: ignore[arg-type]


def test_a_sweep_does_not_wait_for_the_quarantine(
    aside: Aside, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep is on the thread that renews the leases."""
    monkeypatch.setattr(corruption, "quarantine", put_aside)
    aside.backend.open.clear()
    aside.start()
    dead = Ledger(prefix="", visibility_timeout_s=60)
    client.lpush("jobs", "{}")
    dead.take(client, ["jobs"], 1)
    client.hset(dead.unacked, "7", b'garbage {"id": "a"}')
    client.delete(dead.lease)
    sweeper = threading.Thread(target=sweep, args=(client, LedgerKeys.under("")), daemon=True)
    sweeper.start()
    eventually(lambda: not sweeper.is_alive(), "the sweep is done")
    assert aside.backend.failed == []
    aside.backend.open.set()
    eventually(lambda: aside.backend.failed == ["a"], "the task has failed")


def state(task_id: str) -> str:
    return stream_keys(task_id).state


RUNNING: list[Callable[[redis.Redis], object]] = [
    lambda client: client.hset(state("a"), mapping={"attempt": 2, "running": 1, "message:its": "call"}),
    lambda client: client.hset(state("a"), mapping={"attempt": 2, "message:its": "call", "done": "stop"}),
    lambda client: (
        client.set(stream_keys("a").runs, 1),
        client.sadd(stream_keys("a").messages, "its"),
    ),
]


@pytest.mark.parametrize("begin", RUNNING, ids=["running", "ended", "of the application's own"])
@pytest.mark.parametrize("sign", [Sign(), Sign("another's")], ids=["nameless", "named"])
def test_a_task_that_another_message_runs_goes_on(
    aside: Aside, client: redis.Redis, begin: Callable[[redis.Redis], object], sign: Sign
) -> None:
    begin(client)
    before = client.hgetall(state("a"))
    aside.start()
    aside.put("a", sign=sign)
    aside.put("b")
    eventually(lambda: aside.acknowledged == ["a", "b"], "both are acknowledged")
    assert (aside.entries, aside.backend.failed) == (["a", "b"], ["b"])
    assert client.hgetall(state("a")) == before
    assert not client.exists(stream_keys("a").log)


@pytest.mark.parametrize("begin", RUNNING, ids=["running", "ended", "of the application's own"])
@pytest.mark.parametrize("sign", [Sign("its"), Sign(own=True)], ids=["named", "redelivered"])
def test_a_task_whose_own_message_is_refused_when_it_comes_again_fails(
    aside: Aside, client: redis.Redis, begin: Callable[[redis.Redis], object], sign: Sign
) -> None:
    """Its worker has died, and the next one is of another version."""
    begin(client)
    ended = client.hexists(state("a"), "done")
    aside.start()
    aside.put("a", sign=sign)
    eventually(lambda: aside.acknowledged == ["a"], "acknowledged")
    assert aside.backend.failed == ["a"]
    assert client.llen(stream_keys("a").log) == (0 if ended else 1)


def test_a_lost_reply_to_the_end_of_a_stream_keeps_no_task_from_its_result(
    aside: Aside, client: redis.Redis
) -> None:
    aside.backend.errors = [redis.ConnectionError("away")]
    aside.start()
    aside.put("a")
    aside.put("a")
    eventually(lambda: aside.acknowledged == ["a", "a"], "acknowledged")
    assert aside.backend.failed == ["a", "a"]
    assert client.llen(stream_keys("a").log) == 1
