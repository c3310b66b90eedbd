"""The time limits of a generation, and `celery control time_limit`, which changes the two limits of Celery.

All count from admission. The engine ends a generation at the earliest limit, with the finish reason `deadline`:

    soft      Celery's `soft_time_limit`    a success with the output so far; Celery logs the limit
    request   its option `deadline_s`       a success with the output so far
    hard      Celery's `time_limit`         a failure, TimeLimitExceeded; no result is stored
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from celery.worker import control

from petiole.gpu_worker.request import FinishReason
from petiole.tasks.worker.output.outcomes import Outcome

Kind = Literal["soft", "request", "hard"]


class Limit(NamedTuple):
    after_s: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The limits of one generation in seconds; None and 0 are no limit."""

    soft_s: float | None
    request_s: float | None
    hard_s: float | None

    @property
    def earliest(self) -> Limit | None:
        """The earliest limit. Of equal limits the first wins, in the order soft, request, hard."""
        given: tuple[tuple[float | None, Kind], ...]
        given = (self.soft_s, "soft"), (self.request_s, "request"), (self.hard_s, "hard")
        return min((Limit(s, kind) for s, kind in given if s), key=lambda limit: limit.after_s, default=None)

    def exceeded(self, kind: Kind, outcome: Outcome) -> float | None:
        """The limit of this kind, if it ended the generation."""
        limit = self.earliest if outcome.finish_reason == FinishReason.DEADLINE else None
        return limit.after_s if limit is not None and limit.kind == kind else None


@control.control_command(  # type: ignore[untyped-decorator]
    args=[("task_name", str), ("soft", float), ("hard", float)],
    signature="<task_name> <soft_secs> [hard_secs]",
)
def time_limit(
    state: Any, task_name: str | None = None, hard: float | None = None, soft: float | None = None, **_: object
) -> Any:
    """Tell worker(s) to modify the time limit for task by type.

    Unlike a stock worker, which replies that it did so but keeps the old limits, this worker changes them.
    """
    reply = control.time_limit(state, task_name, hard, soft)
    state.consumer.update_strategies()  # new requests read their limits from the strategies
    return reply
