"""The name of Petiole's errors in stored results.

A result backend stores a failure with the module of its class. For Petiole's errors it stores `tasks.errors`,
whatever the module is called in this process: producers and workers of other versions look for that name. This
process looks the name up among Petiole's own errors, and not in a module `tasks` of the application."""

from __future__ import annotations

from functools import cache
from typing import Any

from petiole.contract import errors as contract_errors
from petiole.tasks import errors

STORED_MODULE = "tasks.errors"


class StoredErrors:
    """A mixin for any result backend of Celery's."""

    def prepare_exception(self, exc: BaseException, serializer: str | None = None) -> Any:
        stock: Any = super()
        stored = stock.prepare_exception(exc, serializer)
        if isinstance(stored, dict) and stored["exc_module"] in (errors.__name__, contract_errors.__name__):
            return {**stored, "exc_module": STORED_MODULE}
        return stored

    def exception_to_python(self, exc: Any) -> Any:
        stock: Any = super()
        if isinstance(exc, dict) and exc.get("exc_module") == STORED_MODULE:
            kind = getattr(errors, str(exc.get("exc_type")), None)
            if isinstance(kind, type) and issubclass(kind, errors.PetioleError):
                exc = {**exc, "exc_module": kind.__module__}
        return stock.exception_to_python(exc)


@cache
def with_stored_errors(backend: type) -> type[Any]:
    """`backend`, a class of Celery's, with `StoredErrors` added."""
    if issubclass(backend, StoredErrors):
        return backend
    return type(backend.__name__, (StoredErrors, backend), {"__module__": backend.__module__})
