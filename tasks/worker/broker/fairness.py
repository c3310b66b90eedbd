"""Weighted fair queueing of the tenants' queues.

Start-time fair queueing: every message costs its tenant 1 / weight of virtual time. The next message of a queue
starts at the virtual time at which its last one ended, or now if that has passed; the queue with the earliest
start is served. So

1. Two queues that always have messages are served in proportion to their weights: the number of messages taken,
   divided by the weight, differs between the two by at most the sum of 1 / weight of both.
2. An idle queue accumulates neither credit nor debt.

The unit is messages, because the length of the output is not known when a message is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def tenant_queues(queue: str, weights: Mapping[str, float]) -> dict[str, float]:
    """All queues of a worker and their weights: 1 for the default queue, which serves unnamed tenants."""
    return {queue: 1.0} | {f"{queue}.{tenant}": weight for tenant, weight in weights.items()}


class FairShares:
    """The order of queues, with the interface of kombu's cycles. The default weight is 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: list[str] = []
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def update(self, queues: Iterable[str]) -> None:
        self._queues = list(queues)

    def consume(self, n: int) -> list[str]:
        """The first `n` queues in the order in which to try them for one message."""
        return sorted(self._queues, key=self._start)[:n]

    def rotate(self, queue: str) -> str:
        """Account for a message taken from `queue`."""
        self._now = self._start(queue)
        self._ends[queue] = self._now + 1 / self._weights.get(queue, 1.0)
        return queue

    def _start(self, queue: str) -> float:
        return max(self._now, self._ends.get(queue, 0.0))
