"""Whose queue is served next, where tenants share a fleet by weight.

Start-time fair queueing. Every message costs its tenant 1 / weight of virtual time. A queue's next message starts
where its last one ended, or now if the queue was empty since; the one that starts first is served. So

1. Two queues that always have messages are served by their weights: what each got, divided by its weight, never
   differs by more than 1 / its weight + 1 / the other's.
2. Who asked for nothing for a while has saved nothing up, and owes nothing.

What is counted is requests; how long an answer becomes is not known when its message is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def tenant_queues(queue: str, weights: Mapping[str, float]) -> dict[str, float]:
    """All queues of a worker and their weights: the default one, for everybody who is not named, has 1."""
    return {queue: 1.0} | {f"{queue}.{tenant}": weight for tenant, weight in weights.items()}


class FairShares:
    """The order of queues, with the interface of kombu's cycles. A queue without a weight has 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: list[str] = []
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def update(self, queues: Iterable[str]) -> None:
        self._queues = list(queues)

    def consume(self, n: int) -> list[str]:
        """The queues in the order in which they are to be asked for one message."""
        return sorted(self._queues, key=self._start)[:n]

    def rotate(self, queue: str) -> str:
        """A message of this queue was taken."""
        self._now = self._start(queue)
        self._ends[queue] = self._now + 1 / self._weights.get(queue, 1.0)
        return queue

    def _start(self, queue: str) -> float:
        return max(self._now, self._ends.get(queue, 0.0))
