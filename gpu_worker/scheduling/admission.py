"""Admission: the waiting queue, the delay gate and common prefixes. Data structures and decisions, no effects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict, SortedSet

from petiole.gpu_worker.scheduling.scheduled import ScheduledSequence


class WaitingQueue:
    """Sequences without a row, ordered by rank. Inserting and removing cost O(log n)."""

    def __init__(self) -> None:
        self._by_rank: SortedDict[tuple[int, int], ScheduledSequence] = SortedDict()
        self._arrivals: SortedSet[tuple[float, tuple[int, int]]] = SortedSet()

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Best rank first. Each is looked up when it is reached, so they may be removed while iterating."""
        seq = self.first()
        while seq is not None:
            yield seq
            behind = self._by_rank.bisect_right(seq.rank)
            seq = self._by_rank.peekitem(behind)[1] if behind < len(self._by_rank) else None

    def push(self, seq: ScheduledSequence) -> None:
        self._by_rank[seq.rank] = seq
        self._arrivals.add((seq.arrival_s, seq.rank))

    def remove(self, seq: ScheduledSequence) -> None:
        """Remove a sequence at any position."""
        del self._by_rank[seq.rank]
        self._arrivals.remove((seq.arrival_s, seq.rank))

    def first(self) -> ScheduledSequence | None:
        return self._by_rank.peekitem(0)[1] if self._by_rank else None

    def earliest_arrival_s(self) -> float:
        return float(self._arrivals[0][0])


@dataclass(slots=True)
class DelayGate:
    """Delays admission by `factor` times the last prefill's duration, so that more prompts share a prefill step.

    Always open while nothing runs, since a delay then has no benefit.
    """

    factor: float
    last_prefill_s: float = 0.0

    def is_open(self, waiting: WaitingQueue, running: bool, now: float) -> bool:
        if self.factor == 0 or not running or not len(waiting):
            return True
        return now - waiting.earliest_arrival_s() > self.factor * self.last_prefill_s


def can_reuse(seq: ScheduledSequence, other: ScheduledSequence, n_positions: int) -> bool:
    """Whether `seq` can reuse the first `n_positions` of `other` once that is prefilled."""
    left, right = seq.cache_tokens.codes, other.cache_tokens.codes
    return (
        n_positions <= len(right)
        and left[n_positions - 1] == right[n_positions - 1]  # mostly settles it without comparing all
        and seq.namespace == other.namespace
        and bool((left[:n_positions] == right[:n_positions]).all())
    )
