"""Which time limit ends a generation, and how."""

from __future__ import annotations

import pytest

from petiole.tasks.worker.generation.limits import Limit, TimeLimits
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
    assert limits.earliest == limits.exceeded(DEADLINE) == earliest


def test_only_the_hard_limit_fails_a_task() -> None:
    assert TimeLimits(3, 3, 2).failed(DEADLINE)
    assert not TimeLimits(2, 3, 2).failed(DEADLINE)
    assert not TimeLimits(None, 2, 2).failed(DEADLINE)


def test_a_generation_that_ended_in_time_exceeded_none() -> None:
    ended = Outcome({}, finish_reason="length")
    assert TimeLimits(1, 1, 1).exceeded(ended) is None
    assert not TimeLimits(None, None, 1).failed(ended)
