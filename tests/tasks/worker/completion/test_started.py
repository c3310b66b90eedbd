"""STARTED is stored for those who look, and never over an end."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery, states

from petiole.tasks.worker.completion.backend import store_started
from tests.support.site import RedisServer

META = {"pid": 1, "hostname": "w@test"}


@pytest.fixture
def backend(server: RedisServer, client: redis.Redis) -> Any:
    return Celery("test", backend=server.url, set_as_current=False).backend


def stored(backend: Any) -> tuple[str, Any]:
    meta = backend.get_task_meta("a-task", cache=False)
    return meta["status"], meta["result"]


def test_it_is_seen_and_expires(backend: Any, client: redis.Redis) -> None:
    store_started(backend, "a-task", META, None)
    assert stored(backend) == (states.STARTED, META)
    assert client.ttl(backend.get_key_for_task("a-task")) > 0


@pytest.mark.parametrize("state", [states.STARTED, states.RETRY])
def test_a_later_attempt_replaces_an_earlier_one(backend: Any, state: str) -> None:
    backend.store_result("a-task", {"pid": 0} if state == states.STARTED else ValueError("again"), state)
    store_started(backend, "a-task", META, None)
    assert stored(backend) == (states.STARTED, META)


@pytest.mark.parametrize("state", [states.SUCCESS, states.FAILURE, states.REVOKED])
def test_an_end_stays(backend: Any, state: str) -> None:
    backend.store_result("a-task", "result" if state == states.SUCCESS else ValueError("end"), state)
    store_started(backend, "a-task", META, None)
    assert stored(backend)[0] == state


def test_what_cannot_be_read_may_be_an_end_and_stays(backend: Any, client: redis.Redis) -> None:
    key = backend.get_key_for_task("a-task")
    for value in (b"status: SUCCESS", b"\xff", b"5"):
        client.set(key, value)
        store_started(backend, "a-task", META, None)
        assert client.get(key) == value


def test_an_end_that_comes_between_the_look_and_the_write_stays(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when this worker is stopped there, and another one finishes the task."""
    encode = backend.encode

    def stopped(meta: dict[str, Any]) -> Any:
        if meta["status"] == states.STARTED:
            backend.store_result("a-task", "result", states.SUCCESS)
        return encode(meta)

    monkeypatch.setattr(backend, "encode", stopped)
    store_started(backend, "a-task", META, None)
    assert stored(backend) == (states.SUCCESS, "result")


def test_without_redis_it_is_given_up(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise redis.ConnectionError

    monkeypatch.setattr(backend.client, "evalsha", lost)
    store_started(backend, "a-task", META, None)
