"""How the body of a generation task gets its result.

Celery's trace function runs the body after the generation has ended. Around that call the worker offers the
outcome, and the body takes it, on the same thread. So the body needs nothing of the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from petiole.tasks.errors import GenerationFailed


class Offer(Protocol):
    """A result, or the error that the task fails with."""

    @property
    def result(self) -> dict[str, Any] | None: ...

    @property
    def error(self) -> Exception | None: ...


_here = threading.local()


@contextmanager
def offered(task_id: str, outcome: Offer) -> Iterator[None]:
    """In this context, `take_result` on this thread finds the outcome of task `task_id`."""
    _here.outcome = task_id, outcome
    try:
        yield
    finally:
        del _here.outcome


def take_result(task_id: str) -> dict[str, Any]:
    """For the body of a generation task: return its result or raise its error."""
    nothing: tuple[str, Offer | None] = ("", None)
    known, outcome = getattr(_here, "outcome", nothing)
    if known != task_id or outcome is None:
        raise GenerationFailed(
            "this worker does not run Petiole's app and pool: start it with celery -A petiole worker"
        )
    if outcome.error is not None:
        raise outcome.error
    assert outcome.result is not None
    return outcome.result
