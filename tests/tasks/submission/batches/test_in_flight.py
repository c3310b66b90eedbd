"""How many rows may be on their way, and which of them are lost."""

from __future__ import annotations

from petiole.tasks.submission.batches.in_flight import (
    DOUBTED_S,
    LARGEST_WINDOW,
    OVERTAKEN_S,
    SMALLEST_WINDOW,
    FairShare,
    RowInFlight,
    RowRate,
    RowsInFlight,
    window,
)
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, TaskOutcome
from petiole.tasks.submission.batches.rows.row_types import RowWork
from petiole.tasks.submission.batches.rows.sources import Row

NOTHING = RowWork([], lambda outcomes: OutputLine(True, {}))


def sent(number: int, at: float, tasks: int = 1) -> RowInFlight:
    return RowInFlight(Row(number, b"{}"), NOTHING, [f"{number}-{k}" for k in range(tasks)], at)


def test_the_window_is_what_workers_hold_and_finish_soon() -> None:
    assert window(None, 0) == 64
    assert window(4, 0) == SMALLEST_WINDOW
    assert window(256, 10) == 512
    assert window(64, 500) == 1064
    assert window(64, 1e9) == LARGEST_WINDOW


def test_batches_share_a_window_whatever_their_rates_are() -> None:
    alone = window(64, 500)
    assert [window(64, rate, FairShare(1 / 2, 500 - rate)) for rate in (0, 100, 250)] == [alone // 2] * 3
    assert window(64, 0, FairShare(1 / 100, 500)) == SMALLEST_WINDOW


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = RowRate(0)
    rate.add(5, 50)
    assert rate.at(10) == 5
    rate.add(20, 100)
    assert rate.at(20) == 10


def test_a_row_has_ended_when_all_its_tasks_have() -> None:
    flight = RowsInFlight()
    flight.add(sent(0, 0, tasks=2))
    assert list(flight.ending({"0-0": TaskOutcome({})})) == []
    assert flight.end("0-0", TaskOutcome({})) is None
    assert len(flight) == 1
    assert [outcomes for _, outcomes in flight.ending({"0-1": TaskOutcome({"k": 1})})] == [
        [TaskOutcome({}), TaskOutcome({"k": 1})]
    ]
    assert flight.end("0-1", TaskOutcome({})) is not None
    assert (len(flight), flight.rows, flight.size) == (0, {}, 0)


def test_a_task_is_doubted_when_nothing_waits_or_later_ones_have_ended() -> None:
    flight = RowsInFlight()
    flight.add(sent(0, 0))
    flight.add(sent(1, OVERTAKEN_S + 1))
    now = OVERTAKEN_S + 2
    assert list(flight.doubtful(now, queue_is_empty=False)) == []
    assert list(flight.doubtful(now, queue_is_empty=True)) == ["0-0"]
    assert list(flight.doubtful(now + DOUBTED_S, queue_is_empty=True)) == ["0-0", "1-0"]
    flight.end("1-0", TaskOutcome({}))
    assert list(flight.doubtful(now, queue_is_empty=False)) == ["0-0"]
    flight.resent(["0-0"], now)
    assert list(flight.doubtful(now, queue_is_empty=True)) == []
    assert flight.of["0-0"].again
