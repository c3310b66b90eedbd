"""Which time limit ends a generation, and how."""

from __future__ import annotations

from typing import get_args

import pytest

from petiole.tasks.worker.delivery.delivery import Kind, Limit, TimeLimits
from petiole.tasks.worker.output.outcomes import Outcome

DEADLINE = Outcome({}, finish_reason="deadline")


@pytest.mark.parametrize(
    ("limits", "earliest"),
    [
        (TimeLimits(None, None, None), None),
        (TimeLimits(0, None, 0), None),
        (TimeLimits(3, 2, 4), Limit(2, "request")),
        (TimeLimits(3, None, 2), Limit(2, "hard")),
        (TimeLimits(None, 2, 2), Limit(2, "request")),
        (TimeLimits(2, 2, 2), Limit(2, "soft")),
    ],
)
def test_the_earliest_limit_ends_it_and_of_equal_ones_the_milder(
    limits: TimeLimits, earliest: Limit | None
) -> None:
    assert limits.earliest == earliest
    for kind in get_args(Kind):
        assert limits.exceeded(kind, DEADLINE) == (
            earliest.after_s if earliest and earliest.kind == kind else None
        )


def test_a_generation_that_ended_in_time_exceeded_none() -> None:
    ended = Outcome({}, finish_reason="length")
    assert TimeLimits(1, 1, 1).exceeded("soft", ended) is None
    assert TimeLimits(None, None, 1).exceeded("hard", ended) is None
