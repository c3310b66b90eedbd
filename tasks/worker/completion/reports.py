"""The messages of a completion to its job, and of a standby to its job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from billiard.einfo import ExceptionInfo


@dataclass(frozen=True, slots=True)
class Completed:
    """The message is to be answered with `value`: what Celery's trace returns, or an `ExceptionInfo`."""

    value: object

    @property
    def failed(self) -> bool:
        return isinstance(self.value, ExceptionInfo)


@dataclass(frozen=True, slots=True)
class NotStored:
    """The outcome cannot be stored yet. Later the completion goes on at the step that was refused."""

    reason: BaseException


@dataclass(frozen=True, slots=True)
class NeverStored:
    """Not even a failure can be stored."""

    error: BaseException


class OtherDelivery(Enum):
    ANSWERED = "Celery has answered the message"
    CLAIMED = "another delivery completes the task"
    COMPLETED = "another delivery has completed the task"
    SILENT = "the other delivery shows no sign of life"


Report = Completed | NotStored | NeverStored | OtherDelivery
