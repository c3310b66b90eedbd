from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from petiole.tasks.fleet.reports import HISTOGRAMS
from petiole.tasks.wire.keys import SENT_HEADER
from petiole.tasks.worker.broker.transport import Channel
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.output.outcomes import Outcome, ended
from petiole.tasks.worker.reports.histograms import TaskHistograms


def outcome(
    total_ms: float = 10.0, ttft_ms: float | None = 1.0, completion_tokens: int = 10, attempt: int = 1
) -> Outcome:
    usage = {"prompt_tokens": 20, "cached_prompt_tokens": 5, "completion_tokens": completion_tokens}
    timing = {"queue_ms": 0.5, "prefill_ms": 1.0, "ttft_ms": ttft_ms, "total_ms": total_ms}
    return Outcome({"usage": usage, "timing": timing, "attempt": attempt}, None, "stop")


def taken(*outcomes: Outcome) -> dict[str, Any]:
    tally = TaskHistograms()
    for one in outcomes:
        tally.count(one)
    return tally.report()


@given(st.lists(st.floats(0, 10**7), min_size=1, max_size=50))
def test_each_generation_is_in_the_bucket_of_its_bound(totals_ms: list[float]) -> None:
    found = taken(*(outcome(total_ms=total) for total in totals_ms))["distributions"]["total_s"]
    at_most = [sum(found.counts[: i + 1]) for i in range(len(found.bounds))]
    assert at_most == [sum(total / 1000 <= bound for total in totals_ms) for bound in found.bounds]
    assert sum(found.counts) == len(totals_ms)
    assert abs(found.sum - sum(totals_ms) / 1000) <= 1e-6


def test_bounds_rise() -> None:
    assert all(list(one.bounds) == sorted(set(one.bounds)) for one in HISTOGRAMS.values())


def test_what_an_end_counts_for() -> None:
    found = taken(outcome(), outcome(), Outcome(error=ValueError("no")), ended("revoked"), ended("expired"))
    assert found["finished"] == {"stop": 2, "error": 1, "cancelled": 2}
    assert found["cached_prompt_tokens"] == 10
    assert found["distributions"]["prompt_tokens"].sum == 40
    assert found["distributions"]["per_output_token_s"].sum == 0.002


def test_no_pauses_without_a_second_token_or_with_somebody_elses() -> None:
    found = taken(outcome(completion_tokens=1), outcome(ttft_ms=None), outcome(attempt=2))["distributions"]
    assert "per_output_token_s" not in found
    assert sum(found["ttft_s"].counts) == 2


def test_waits_are_told_apart_by_priority_and_are_never_less_than_nothing() -> None:
    tally = TaskHistograms()
    for priority, seconds in [(0, 0.02), (9, 4000.0), (9, 0.0), (0, -3.0)]:
        tally.waited(priority, seconds)
    found = tally.report()["broker_s"]
    assert set(found) == {"0", "9"}
    assert [(sum(found[step].counts), found[step].sum) for step in "09"] == [(2, 0.02), (2, 4000.0)]
    assert found["0"].counts[0] == 1


class FakeChannel(Channel):
    def __init__(self) -> None:
        pass

    def __del__(self, *_: object) -> None:
        pass


def delivery(message: dict[str, Any], channel: object = None) -> Delivery:
    request = SimpleNamespace(message=SimpleNamespace(channel=channel))
    accept = SimpleNamespace(__self__=request)
    return Delivery(print, ("tasks.generate", "id", message), accept, print, print, None, None)  # type: ignore[arg-type]


def test_a_wait_is_from_the_producers_clock_to_the_time_of_taking() -> None:
    taken_at = time.monotonic() - 5
    waited = delivery({SENT_HEADER: time.time() - 12}).broker_s(taken_at)
    assert waited is not None
    assert 6.9 < waited < 7.1


@pytest.mark.parametrize("sent", [None, "1", True, [], {}, 10**400, float("nan"), -1])
def test_a_message_that_does_not_say_when_it_was_sent_counts_for_nothing(sent: object) -> None:
    assert delivery({SENT_HEADER: sent}).broker_s(0.0) is None


def test_a_task_for_later_does_not_wait_in_the_broker() -> None:
    assert delivery({SENT_HEADER: 1.0, "eta": "2030-01-01T00:00:00"}).broker_s(0.0) is None


@pytest.mark.parametrize(("priority", "step"), [(None, 0), (2, 0), (3, 3), (7, 6), (9, 9)])
def test_on_redis_a_priority_is_that_of_its_list(priority: int | None, step: int) -> None:
    message = {"delivery_info": {"priority": priority}}
    assert delivery(message, FakeChannel()).priority_step == step
    assert delivery(message).priority_step == (priority or 0)
