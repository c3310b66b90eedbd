"""What a job decides, for its driver to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from petiole.gpu_worker.request import Request
from petiole.tasks.worker.completion.steps import Step
from petiole.tasks.worker.output.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the request to the engine."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Have the engine end the request."""


@dataclass(frozen=True, slots=True)
class HandBack:
    """Have the engine hand the request back."""


@dataclass(frozen=True, slots=True)
class Release:
    """Write what is left of the output, and mark the task as handed back."""


@dataclass(frozen=True, slots=True)
class WriteEnd:
    """Write the last delta and the record of the outcome."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Flag:
    """Set the cancel flag in Redis, for the next worker that gets the task."""


@dataclass(frozen=True, slots=True)
class Accept:
    """The request has a place in the engine since `at`: tell Celery, unless the task was stopped."""

    at: float
    stopped: bool


@dataclass(frozen=True, slots=True)
class StoreStarted:
    """Store the state STARTED."""


@dataclass(frozen=True, slots=True)
class Count:
    """Count the end in the worker's figures."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Take:
    """Take a step of the completion."""

    step: Step


@dataclass(frozen=True, slots=True)
class TakeLater:
    """Take the step in a second. `refusal`: log that the outcome is refused, and why."""

    step: Step
    refusal: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StandBy:
    """Watch the delivery that has the task."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Answer the message with a result, or an `ExceptionInfo`. Have Celery log that a soft limit was exceeded."""

    failed: bool
    value: object
    runtime_s: float
    soft_limit_s: float | None


@dataclass(frozen=True, slots=True)
class Leave:
    """Acknowledge the message without a result or event: another delivery reports how the task ended."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue the message: another delivery resumes or completes the task."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Log the error, write nothing more, and requeue the message in a moment."""

    error: BaseException


Effect = (
    Submit
    | Cancel
    | HandBack
    | Release
    | WriteEnd
    | Flag
    | Accept
    | StoreStarted
    | Count
    | Take
    | TakeLater
    | StandBy
    | Settle
    | Leave
    | Requeue
    | GiveUp
)
Effects = list[Effect]
