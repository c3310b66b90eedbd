from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tasks.worker.results import Outcome, ended
from tasks.worker.tally import BOUNDS, Tally


def outcome(
    total_ms: float = 10.0, ttft_ms: float | None = 1.0, completion_tokens: int = 10, attempt: int = 1
) -> Outcome:
    usage = {"prompt_tokens": 20, "cached_prompt_tokens": 5, "completion_tokens": completion_tokens}
    timing = {"queue_ms": 0.5, "prefill_ms": 1.0, "ttft_ms": ttft_ms, "total_ms": total_ms}
    return Outcome({"usage": usage, "timing": timing, "attempt": attempt}, None, "stop")


def taken(*outcomes: Outcome) -> dict[str, Any]:
    tally = Tally()
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
    assert all(list(bounds) == sorted(set(bounds)) for bounds in BOUNDS.values())


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
