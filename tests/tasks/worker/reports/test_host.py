"""A worker says what is wrong around it: little memory, and a clock that differs from Redis's."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from petiole.tasks.worker.reports import host
from petiole.tasks.worker.reports.host import ProcessMemory, resident_bytes, say_if_clocks_differ


def test_scarce_memory_is_said_once_until_there_is_more(caplog: pytest.LogCaptureFixture) -> None:
    used, left = resident_bytes(), 0
    assert used > 2**20
    memory = ProcessMemory(lambda: left)
    for share, lines in ((1.0, 0), (0.01, 1), (0.01, 1), (1.0, 1), (0.02, 2)):
        left = int(share * used)
        assert memory.report()["memory_left_bytes"] == left
        assert caplog.text.count("MiB are left below the container's limit") == lines


def test_without_a_limit_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert ProcessMemory(lambda: None).report()["memory_left_bytes"] is None
    assert caplog.records == []


class Clock:
    """Redis, as far as its time: so many seconds behind this machine's."""

    def __init__(self, behind_s: float) -> None:
        self.behind_s = behind_s

    def time(self) -> tuple[int, int]:
        now = host.time.time() - self.behind_s
        return int(now), int(now % 1 * 1e6)


@pytest.mark.parametrize(
    ("behind_s", "said"), [(3600.0, "is 3600 s ahead of that"), (-60.0, "is 60 s behind that"), (1.0, "")]
)
def test_a_clock_that_differs_is_named(behind_s: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    say_if_clocks_differ(Clock(behind_s))  # type: ignore[arg-type]
    assert [said in record.message for record in caplog.records] == [True] * bool(said)


def test_a_redis_that_is_away_says_nothing_of_clocks(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        def time(self) -> Any:
            raise redis.ConnectionError("away")

    say_if_clocks_differ(Away())  # type: ignore[arg-type]
    assert caplog.records == []
