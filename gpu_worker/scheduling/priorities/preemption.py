"""Who gives way when rows or pages run out: a decision over counts, without effects.

Sequences in need are served by rank. For each of them, the worst-ranked sequences give way until it has room. If
all of them together would not make enough room, none gives way.

    in need                                  gives way
    a sequence with a row (needs pages)      sequences that rank below it
    a waiting one (needs a row or pages)     sequences of a worse priority

Rows and pages that ended and preempted sequences hold until their last step is committed count as room already.
The decision assumes that a sequence releases all pages of its row, although others may share some of them. So
never more sequences give way than are needed. If they were too few, a later plan asks again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from petiole.cache import Amount
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Need:
    """A sequence that lacks `pages` for its next step, or, if it waits, for its whole prefill."""

    seq: ScheduledSequence
    pages: Amount

    @property
    def waits(self) -> bool:
        return self.seq.blocks is None

    def outranks(self, other: ScheduledSequence) -> bool:
        rank, below = self.seq.rank, other.rank
        return rank[0] < below[0] if self.waits else rank < below


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence with a row. `pages`: how many it holds; `reserved`: how many are kept free for it."""

    seq: ScheduledSequence
    pages: Amount
    reserved: Amount


@dataclass(slots=True)
class Room:
    """Rows and pages that are free, now or soon. Only sequences that have a row already may use `reserved`
    pages."""

    rows: int
    pages: Amount
    reserved: Amount

    def fits(self, need: Need) -> bool:
        if need.waits:
            return self.rows > 0 and need.pages <= self.pages - self.reserved
        return need.pages <= self.pages

    def take(self, need: Need) -> None:
        if need.waits:
            self.rows -= 1
        self.pages -= need.pages

    def release(self, holder: Holder) -> None:
        self.rows += 1
        self.pages += holder.pages
        self.reserved -= holder.reserved


def giving_way(needs: Iterable[Need], holders: Iterable[Holder], room: Room) -> list[ScheduledSequence]:
    """The sequences to preempt, worst-ranked first."""
    keeping = sorted(holders, key=lambda holder: holder.seq.rank)
    n_keeping = len(keeping)
    starved = False  # a waiting sequence does not start before a waiting one of better rank
    for need in sorted(needs, key=lambda need: need.seq.rank):
        if starved and need.waits:
            continue
        if not need.waits and any(holder.seq is need.seq for holder in keeping[n_keeping:]):
            break  # it gives way itself, and so do all sequences of worse rank that have a row
        after, kept = replace(room), n_keeping
        while not after.fits(need) and kept and need.outranks(keeping[kept - 1].seq):
            kept -= 1
            after.release(keeping[kept])
        if after.fits(need):
            after.take(need)
            room, n_keeping = after, kept
        else:
            starved |= need.waits
    return [holder.seq for holder in reversed(keeping[n_keeping:])]
