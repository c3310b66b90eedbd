"""The exceptions that a caller of a task may get.

A worker stores a failure as (module, class, args) in JSON. From these, `AsyncResult.get()` recreates the exception
in the caller's process, which need not have the worker's packages. So every exception that a task may raise is
a name of this module, and its `args` are JSON values from which it can be recreated. The same holds for the error
in the last delta of a failed stream: `describe` encodes it, `rebuild` decodes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import celery.exceptions
from click import ClickException
from kombu.exceptions import OperationalError

from petiole.contract.errors import InvalidRequest as InvalidRequest, PetioleError as PetioleError

_CELERYS = {"TimeLimitExceeded", "SoftTimeLimitExceeded", "TaskRevokedError", "WorkerLostError"}


class InvalidSettings(PetioleError, ClickException, ValueError):  # noqa: N818
    """An environment variable, named in full, has an invalid value.

    Celery's commands, which use click, print the message and exit with status 2.
    """

    exit_code = 2


class GenerationFailed(PetioleError, RuntimeError):  # noqa: N818
    """The request is valid, but it has no result: the engine failed, or the data of earlier attempts in Redis is
    damaged. Another submission may succeed."""


class ModelChanged(PetioleError, RuntimeError):  # noqa: N818
    """The task was begun with a model or adapter that this worker does not serve, so it cannot be resumed."""


class ResultTooLarge(PetioleError, ValueError):  # noqa: N818
    """The result's JSON has more bytes than `PETIOLE_RESULT_MAX_BYTES`. The stream has all of the output."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size, self.limit = size, limit

    def __str__(self) -> str:
        sizes = f"the result has {self.size} bytes as JSON, and the limit is {self.limit}"
        return f"{sizes}; the stream has the whole output"


class WorkersLost(PetioleError, RuntimeError):  # noqa: N818
    """`deaths` workers died while they ran the task, so it is not delivered again.

    `text` is the output that was generated before.
    """

    def __init__(self, deaths: int, text: str = "") -> None:
        super().__init__(deaths, text)
        self.deaths, self.text = deaths, text

    def __str__(self) -> str:
        written = f", after {len(self.text)} characters" if self.text else ""
        return f"{self.deaths} workers died while they worked on this task{written}"


class Unavailable(PetioleError, OperationalError):  # noqa: N818
    """The broker or result backend at `url`, shown without password, is unreachable. Like Celery's own error, it
    is an `OperationalError`."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"{self.url} is not available: {self.reason}"


class Unconfirmed(PetioleError, RuntimeError):  # noqa: N818
    """The task is submitted, but within `timeout_s` only `have` of `wanted` replicas of the broker have confirmed
    that they have it. A failover may lose it. The same submission again, with the same `task_id`, makes no second
    generation."""

    def __init__(self, have: int, wanted: int, timeout_s: float) -> None:
        super().__init__(have, wanted, timeout_s)
        self.have, self.wanted, self.timeout_s = have, wanted, timeout_s

    def __str__(self) -> str:
        wanted = f"the task must be at {self.wanted} replica{'s' * (self.wanted != 1)} within {self.timeout_s:g} s"
        return f"confirm: {wanted}, but it is at {self.have}"


class NoWorker(PetioleError, RuntimeError):  # noqa: N818
    """The task was submitted with `require_worker`, and no worker of its queue has been seen for `limit_s`
    seconds."""

    def __init__(self, missing: str, limit_s: float) -> None:
        super().__init__(missing, limit_s)
        self.missing, self.limit_s = missing, limit_s

    def __str__(self) -> str:
        return f"require_worker: a worker must have been seen within {self.limit_s:g} s, but {self.missing}"


class BatchError(PetioleError, RuntimeError):
    """A batch cannot go on: its output cannot be written, or is of another batch."""


class StreamError(PetioleError):
    """The stream cannot be read any further. The task may have any state."""


class StreamTimeout(StreamError, TimeoutError):  # noqa: N818
    """No delta arrived within `timeout_s`. The task goes on."""


class StreamExpired(StreamError):  # noqa: N818
    """The log and the result expired before this reader had read all of the stream."""


class UnknownTask(StreamError, LookupError):  # noqa: N818
    """Redis has nothing of a task with this id. Nobody has submitted it; or it waits, and was not submitted with
    `registered`; or its stream has expired."""


def describe(error: BaseException) -> dict[str, Any]:
    """The `error` object of a failed stream's last delta."""
    return {"type": type(error).__name__, "message": str(error), "args": list(error.args)}


def rebuild(error: Mapping[str, Any]) -> Exception:
    """The inverse of `describe`. Exceptions that are neither Petiole's nor Celery's become `GenerationFailed`."""
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
