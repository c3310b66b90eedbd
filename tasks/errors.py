"""What can go wrong, as the caller of a task sees it.

A worker stores a failure as (module, class, args) in JSON, and `AsyncResult.get()` builds the exception anew
from those, here, in a process that has none of the worker's packages. So every exception that a task may end
with is defined in this module, and its `args` are JSON values from which it can be built again.
The same holds for the last delta of a failed stream: `describe` writes it, `rebuild` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import celery.exceptions
from click import ClickException
from kombu.exceptions import OperationalError

_SHOWN = 200
_CELERYS = {"TimeLimitExceeded", "SoftTimeLimitExceeded", "TaskRevokedError", "WorkerLostError"}


class PetioleError(Exception):
    """The base of everything below."""


class InvalidRequest(PetioleError, ValueError):  # noqa: N818 - the name that users see in a task's result
    """A request that cannot be served as it stands; never retried.

    `field` is the request's field, `limit` what it must satisfy, `value` what was given (shortened).
    """

    def __init__(self, field: str, limit: str, value: object) -> None:
        shown = value if isinstance(value, str) and len(value) <= 2 * _SHOWN else shorten(value)
        super().__init__(field, limit, shown)
        self.field, self.limit, self.value = field, limit, shown

    def __str__(self) -> str:
        return f"{self.field}: {self.limit}, got {self.value}"


class InvalidSettings(PetioleError, ClickException, ValueError):  # noqa: N818
    """An environment variable that cannot be used, by its full name.

    Celery's commands, which are click's, end with this line and status 2.
    """

    exit_code = 2


class GenerationFailed(PetioleError, RuntimeError):  # noqa: N818
    """The engine failed while it worked on this request, which may do better elsewhere."""


class ModelChanged(PetioleError, RuntimeError):  # noqa: N818
    """The task was begun with a model or adapter that this worker does not serve, so it cannot go on here."""


class ResultTooLarge(PetioleError, ValueError):  # noqa: N818
    """The result's JSON has more bytes than `PETIOLE_RESULT_MAX_BYTES`. All of the output is in the stream."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size, self.limit = size, limit

    def __str__(self) -> str:
        return f"the result has {self.size} bytes as JSON, and the limit is {self.limit}; its stream has all of it"


class WorkersLost(PetioleError, RuntimeError):  # noqa: N818
    """The task was being generated when `deaths` workers died, so it is not tried again.

    `text` is what had been generated.
    """

    def __init__(self, deaths: int, text: str = "") -> None:
        super().__init__(deaths, text)
        self.deaths, self.text = deaths, text

    def __str__(self) -> str:
        return f"{self.deaths} workers died while they worked on this task, after {len(self.text)} characters"


class Unavailable(PetioleError, OperationalError):  # noqa: N818
    """The broker or the result backend at `url`, which shows no password. Celery's callers catch its base."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"{self.url} is not available: {self.reason}"


class StreamError(PetioleError):
    """A stream that cannot be read on, whatever became of the task."""


class StreamTimeout(StreamError, TimeoutError):  # noqa: N818
    """Nothing arrived for as long as the reader was willing to wait. The task goes on."""


class StreamExpired(StreamError):  # noqa: N818
    """The log was deleted, by its time to live, before this reader had read it to its end."""


def describe(error: BaseException) -> dict[str, Any]:
    """The `error` object of a failed stream's last delta."""
    return {"type": type(error).__name__, "message": str(error), "args": list(error.args)}


def rebuild(error: Mapping[str, Any]) -> Exception:
    """The exception that `describe` was given, or `GenerationFailed` where it was neither ours nor Celery's."""
    name = error.get("type", "")
    kind = getattr(celery.exceptions, name) if name in _CELERYS else globals().get(name)
    if isinstance(kind, type) and (name in _CELERYS or issubclass(kind, PetioleError)):
        try:
            rebuilt: Exception = kind(*error.get("args", ()))
        except TypeError:
            pass
        else:
            return rebuilt
    return GenerationFailed(f"{error.get('type', 'error')}: {error.get('message', '')}")


def shorten(value: object) -> str:
    """`repr`, cut to what fits into a message."""
    try:
        if isinstance(value, str | bytes | list | tuple) and len(value) > _SHOWN:
            return f"{repr(value[:_SHOWN])[:_SHOWN]}… ({len(value)} in all)"
        shown = repr(value)
    except RecursionError:
        return "something deeply nested"
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(shown)} characters)"
