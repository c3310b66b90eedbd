"""The result backend: what Celery's own would do otherwise."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from celery import states

from petiole.tasks.app.application import make_app
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import settings
from tests.support.site import RedisServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    yield server
    server.kill()
    settings.cache_clear()


def test_a_result_is_stored_without_a_warning_and_expires(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors, one of redis-py's ended the worker of a test."""
    monkeypatch.setenv("PETIOLE_RESULT_EXPIRES_S", "500")
    backend = make_app().backend
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.store_result("a", {"text": "x"}, states.SUCCESS)
    assert backend.get_task_meta("a", cache=False)["result"] == {"text": "x"}
    assert 490 < connect(server.url).ttl(backend.get_key_for_task("a")) <= 500
    backend.expires = None
    backend.store_result("b", 1, states.SUCCESS)
    assert connect(server.url).ttl(backend.get_key_for_task("b")) == -1


def test_nobody_waits_for_a_redis_that_is_away_to_drop_a_result(server: RedisServer) -> None:
    """The garbage collector drops results, in any thread at any time."""
    app = make_app()
    dropped, kept = map(app.AsyncResult, "ab")
    for result in (dropped, kept):
        app.backend.add_pending_result(result, weak=True)  # as a group does that is submitted
    del result
    server.kill()
    with mock.patch.object(app.backend, "ensure") as reconnected:
        del dropped
        gc.collect()
    assert not reconnected.called
    assert app.backend.result_consumer.subscribed_to == {app.backend.get_key_for_task("b")}
    server.start()
    app.backend.store_result("b", 1, states.SUCCESS)
    assert kept.get(timeout=30) == 1
