"""What a worker may hold, while some of it is scheduled for later."""

from __future__ import annotations

import logging

import pytest

from petiole.tasks.worker.broker.consumer import Prefetch


def prefetch(value: int, limit: int | None) -> Prefetch:
    return Prefetch(lambda prefetch_count: None, value, max_prefetch=limit)


@pytest.mark.parametrize("scheduled", [5, 60])
def test_what_was_scheduled_leaves_the_prefetch_as_it_was(scheduled: int) -> None:
    count = prefetch(12, 20)
    assert [count.increment_eventually() for _ in range(scheduled)][-1] == min(20, 12 + scheduled)
    assert [count.decrement_eventually() for _ in range(scheduled)][-1] == 12


def test_a_limit_below_the_prefetch_does_not_lower_it() -> None:
    assert prefetch(30, 20).increment_eventually() == 30


@pytest.mark.parametrize(("value", "limit", "after"), [(12, None, 13), (0, 20, 0)])
def test_without_a_limit_it_grows_and_no_prefetch_stays_none(value: int, limit: int | None, after: int) -> None:
    assert prefetch(value, limit).increment_eventually() == after


def test_reaching_the_limit_is_said_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    count = prefetch(19, 20)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for _ in range(3):
                count.increment_eventually()
            for _ in range(3):
                count.decrement_eventually()
    assert [record.getMessage().endswith("worker_eta_task_limit is 20") for record in caplog.records] == [True] * 2
