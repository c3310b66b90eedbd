"""The steps of a completion, and what they report.

Replay ──not completed──► Claim ──► Trace ──success─────────────────► Mark ──► Completed
   │                        │ ├──► TimeOut, Announce ──► Answered       ▲
   └► Left, Wait            │ │                                         │
                            │ └──► Trace ──failure──► Examine ──────────┤
                            └► Elsewhere                  └► refused: Trace again, or Store
any step ──refused by the backend──► Refused      any step ──another error──► Fail ──► Mark
"""

from __future__ import annotations

from dataclasses import dataclass

from billiard.einfo import ExceptionInfo


@dataclass(frozen=True, slots=True)
class Replay:
    """Complete the task unless an earlier delivery has done so."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim the completion, then report the outcome to Celery."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Run Celery's trace, which stores the outcome and sends what is linked to it."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Store REVOKED, on the consumer's thread."""


@dataclass(frozen=True, slots=True)
class TimeOut:
    """Store that the task exceeded its hard limit, on the consumer's thread."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class Examine:
    """The trace has reported a failure: find out what is stored."""

    failure: ExceptionInfo


@dataclass(frozen=True, slots=True)
class Store:
    """Store a success that the backend has refused before. What is linked to it was sent."""

    failure: ExceptionInfo


@dataclass(frozen=True, slots=True)
class Fail:
    """Store a failure: the completion failed, and would fail again with each delivery."""

    failure: ExceptionInfo


@dataclass(frozen=True, slots=True)
class Mark:
    """Record that the task is completed. `value`: its result, or an `ExceptionInfo`."""

    failed: bool
    value: object


Step = Replay | Claim | Trace | Announce | TimeOut | Examine | Store | Fail | Mark
How = Trace | Announce | TimeOut
"""How an outcome is reported to Celery."""
CONSUMERS = (Announce, TimeOut)
"""The steps that change Celery's request: only the consumer's thread may take them."""


@dataclass(frozen=True, slots=True)
class Next:
    """Take `step`, on another thread."""

    step: Step


@dataclass(frozen=True, slots=True)
class Wait:
    """Take `step` later."""

    step: Step


@dataclass(frozen=True, slots=True)
class Refused:
    """The result backend refuses the outcome: take `step` later."""

    step: Step
    reason: BaseException


@dataclass(frozen=True, slots=True)
class Completed:
    """The message is to be answered with this."""

    failed: bool
    value: object


@dataclass(frozen=True, slots=True)
class Answered:
    """Celery has answered the message."""


@dataclass(frozen=True, slots=True)
class Left:
    """Another delivery has completed the task."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another delivery completes the task."""


@dataclass(frozen=True, slots=True)
class Silent:
    """The other delivery shows no sign of life."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Not even a failure can be stored."""

    error: BaseException


Report = Next | Wait | Refused | Completed | Answered | Left | Elsewhere | Silent | Hopeless
