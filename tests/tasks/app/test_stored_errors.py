"""A stored error names the module that all versions look for, and is found without asking an application's own."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from celery.backends.cache import CacheBackend

from petiole.tasks import errors
from petiole.tasks.app.application import make_app
from petiole.tasks.app.stored_errors import StoredErrors, with_stored_errors

ERRORS = [
    errors.InvalidRequest("max_tokens", "must be at least 1", 0),
    errors.GenerationFailed("the engine failed"),
    errors.ResultTooLarge(10, 5),
    errors.WorkersLost(3, "text"),
    errors.Unavailable("redis://h", "refused"),
]


@pytest.fixture(params=["cache+memory://", "rpc://", "redis://localhost:1"])
def backend(request: pytest.FixtureRequest) -> Any:
    app = make_app()
    app.conf.update(result_backend=request.param, broker_url="memory://")
    return app.backend


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_stored_and_found_in_every_backend(backend: Any, error: Exception) -> None:
    stored = json.loads(json.dumps(backend.prepare_exception(error)))
    assert (stored["exc_module"], stored["exc_type"]) == ("tasks.errors", type(error).__name__)
    found = backend.exception_to_python(stored)
    assert type(found) is type(error)
    assert found.args == error.args


def test_no_module_of_an_application_is_asked_for_them(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("tasks.errors")
    theirs.InvalidRequest = theirs.SoldOut = type("Theirs", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tasks.errors", theirs)
    ours = {"exc_module": "tasks.errors", "exc_type": "InvalidRequest", "exc_message": ["f", "l", "v"]}
    assert type(backend.exception_to_python(ours)) is errors.InvalidRequest
    others = {"exc_module": "tasks.errors", "exc_type": "SoldOut", "exc_message": ["leaf"]}
    assert type(backend.exception_to_python(others)) is theirs.SoldOut


def test_what_is_no_exception_of_ours_is_not_called(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tasks.errors", raising=False)
    for name in ("describe", "shorten", "ClickException", "Mapping"):
        stored = {"exc_module": "tasks.errors", "exc_type": name, "exc_message": ["x"]}
        assert not isinstance(backend.exception_to_python(stored), errors.PetioleError)


def test_a_backend_is_changed_once() -> None:
    changed = with_stored_errors(CacheBackend)
    assert issubclass(changed, StoredErrors)
    assert with_stored_errors(changed) is changed is with_stored_errors(CacheBackend)
