"""Who starts next: the waiting queue, the delay gate, shared prefixes. Decisions only, no effects."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_worker.scheduling.scheduled import ScheduledSequence


class WaitingQueue:
    """Sequences without a row, best rank first. Cancelled ones are taken out at once."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], ScheduledSequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Best rank first. Lazily: usually only the first few are looked at."""
        heap = self._heap.copy()
        while heap:
            yield heapq.heappop(heap)[1]

    def push(self, seq: ScheduledSequence) -> None:
        heapq.heappush(self._heap, (seq.rank, seq))

    def remove(self, seq: ScheduledSequence) -> None:
        """Take one out, wherever it is."""
        self._heap.remove((seq.rank, seq))
        heapq.heapify(self._heap)

    def first(self) -> ScheduledSequence | None:
        return self._heap[0][1] if self._heap else None

    def earliest_arrival_s(self) -> float:
        return min(seq.arrival_s for _, seq in self._heap)


@dataclass(slots=True)
class DelayGate:
    """Lets the waiting queue grow for `factor` of the last prefill's duration, so that prefills batch better.

    Open while nothing runs: then nobody gains from waiting.
    """

    factor: float
    last_prefill_s: float = 0.0

    def is_open(self, waiting: WaitingQueue, running: bool, now: float) -> bool:
        if self.factor == 0 or not running or not len(waiting):
            return True
        return now - waiting.earliest_arrival_s() > self.factor * self.last_prefill_s


def shared_prefix(a: ScheduledSequence, b: ScheduledSequence, page_size: int) -> int:
    """KV positions that `b` could take over from `a` once `a` is prefilled: whole pages, one left to compute."""
    if a.namespace != b.namespace:
        return 0
    left, right = a.cache_tokens.codes, b.cache_tokens.codes
    limit = min(len(left), len(right) - 1)
    differs = (left[:limit] != right[:limit]).nonzero()[0]
    common = int(differs[0]) if len(differs) else limit
    return common // page_size * page_size
