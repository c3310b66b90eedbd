"""The result backend: what Celery's own would do otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from celery import states

from petiole.tasks.app.application import make_app
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import settings
from tests.support.site import RedisServer


def test_a_result_is_stored_without_a_warning_and_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where warnings are errors, one of redis-py's ended the worker of a test."""
    server = RedisServer(tmp_path)
    try:
        monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
        monkeypatch.setenv("PETIOLE_RESULT_EXPIRES_S", "500")
        settings.cache_clear()
        backend = make_app().backend
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backend.store_result("a", {"text": "x"}, states.SUCCESS)
        assert backend.get_task_meta("a", cache=False)["result"] == {"text": "x"}
        assert 490 < connect(server.url).ttl(backend.get_key_for_task("a")) <= 500
        backend.expires = None
        backend.store_result("b", 1, states.SUCCESS)
        assert connect(server.url).ttl(backend.get_key_for_task("b")) == -1
    finally:
        server.kill()
        settings.cache_clear()
