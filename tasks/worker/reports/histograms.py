"""Histograms of the times that tasks waited in the broker, and of the times and tokens of generations that ended
on this worker: see `tasks.fleet.exporter`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from petiole.tasks.errors import InvalidRequest, ResultTooLarge
from petiole.tasks.fleet.reports import HISTOGRAMS, WAITS_S, Distribution
from petiole.tasks.worker.output.outcomes import Outcome

BROKER_S = (*WAITS_S, 3600.0, 4 * 3600.0, 12 * 3600.0)

CALLERS = (InvalidRequest, ResultTooLarge)
"""Errors that the task's sender has caused. All others are the servers' faults: workers, models, Redis."""


class TaskHistograms:
    """Counts taken tasks and ended generations. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._cached_prompt_tokens = 0
        self._buckets = {name: _Buckets(one.bounds) for name, one in HISTOGRAMS.items()}
        self._broker: defaultdict[int, _Buckets] = defaultdict(lambda: _Buckets(BROKER_S))

    def waited(self, priority: int, seconds: float) -> None:
        """Count a task's wait in the broker. A negative time, from clocks that differ, counts as 0."""
        with self._lock:
            self._broker[priority].add(max(0.0, seconds))

    def count(self, outcome: Outcome) -> None:
        with self._lock:
            self._finished[outcome.finish_reason] += 1
            if outcome.error is not None and not outcome.revoked:
                self._failed["caller" if isinstance(outcome.error, CALLERS) else "server"] += 1
            if outcome.result is not None and not outcome.revoked:
                self._cached_prompt_tokens += outcome.result["usage"]["cached_prompt_tokens"]
                for name, value in _measured(outcome.result).items():
                    self._buckets[name].add(value)

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`."""
        with self._lock:
            return {
                "finished": dict(self._finished),
                "failed": dict(self._failed),
                "cached_prompt_tokens": self._cached_prompt_tokens,
                "distributions": {
                    name: buckets.distribution() for name, buckets in self._buckets.items() if buckets
                },
                "broker_s": {str(step): buckets.distribution() for step, buckets in self._broker.items()},
            }


def _measured(result: dict[str, Any]) -> dict[str, float]:
    usage, timing = result["usage"], result["timing"]
    completion_tokens, ttft_ms = usage["completion_tokens"], timing["ttft_ms"]
    values = {
        "queue_s": timing["queue_ms"] / 1000,
        "total_s": timing["total_ms"] / 1000,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": completion_tokens,
    }
    if ttft_ms is not None:
        values["ttft_s"] = ttft_ms / 1000
        if completion_tokens > 1 and result["attempt"] == 1:  # later attempts did not generate all tokens
            values["per_output_token_s"] = (timing["total_ms"] - ttft_ms) / 1000 / (completion_tokens - 1)
    return values


class _Buckets:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def __bool__(self) -> bool:
        return any(self._counts)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def distribution(self) -> Distribution:
        return Distribution(bounds=list(self._bounds), counts=list(self._counts), sum=round(self._sum, 6))
