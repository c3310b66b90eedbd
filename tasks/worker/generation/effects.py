"""The effects that a job decides on. Its driver carries them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from petiole.gpu_worker.request import Request
from petiole.tasks.worker.output.outcomes import Outcome


class Action(Enum):
    """The effects without data."""

    CANCEL = "have the engine end the request"
    HAND_BACK = "have the engine hand the request back"
    RELEASE = "write what is left of the output, and mark the task as handed back"
    FLAG = "set the cancel flag in Redis, for the next worker that gets the task"
    STORE_STARTED = "store the state STARTED"
    GO_ON = "let the completion go on at the step that was refused"
    STAND_BY = "watch the delivery that has the task"
    LEAVE = "acknowledge the message without a result or event: another delivery reports how the task ended"
    REQUEUE = "requeue the message: another delivery resumes or completes the task"


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the request to the engine."""

    request: Request


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell Celery that the request got a place in the engine at the time `at`."""

    at: float


@dataclass(frozen=True, slots=True)
class WriteEnd:
    """Write the last delta and the record of the outcome."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Count:
    """Count the end in the worker's figures."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Complete:
    """Complete the task. `replay`: first look whether another delivery has completed it; if so, do nothing."""

    replay: bool


@dataclass(frozen=True, slots=True)
class Park:
    """Try to store the outcome again in a second. `refusal`: the reason to log; None: log nothing."""

    refusal: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """Answer the message with `value`: a result, or, if `failed`, an `ExceptionInfo`.

    `soft_limit_s`: have Celery log that this soft limit was exceeded; None: it was not."""

    failed: bool
    value: object
    runtime_s: float
    soft_limit_s: float | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Log the error, write nothing more, and requeue the message in a moment."""

    error: BaseException


Effect = Action | Submit | Accept | WriteEnd | Count | Complete | Park | Settle | GiveUp
Effects = list[Effect]
Event = Callable[[], Effects]
"""A method of a job, with its arguments."""
