"""Who gives way when rows or pages run out. As many of the worst-ranked sequences are preempted as are needed, by
the sequences that a plan has left out and by those that the next prefill step could start. The best-ranked
sequence always makes progress, so sequences cannot deadlock.

Sequences in need are served by rank. For each of them, the worst-ranked sequences give way until it has room. If
all of them together would not make enough room, none gives way.

    in need                                  gives way
    a sequence with a row (needs pages)      sequences that rank below it
    a waiting one (needs a row or pages)     sequences of a worse priority

Rows and pages that ended and preempted sequences hold until their last step is committed count as room already.
The decision assumes that a sequence releases all pages of its row, although others may share some of them. So
never more sequences give way than are needed. If they were too few, a later plan asks again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from petiole.cache import Amount
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.planning.candidates import Candidates, PlannedPages, rank
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Need:
    """A sequence that lacks `pages` for its next step, or, if it waits, for its whole prefill."""

    seq: ScheduledSequence
    pages: Amount

    @property
    def waits(self) -> bool:
        return self.seq.allocation is None

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


class Relief:
    """`chunk`: the most positions of a chunk."""

    def __init__(self, state: SchedulerState, candidates: Candidates, pages: PlannedPages, chunk: int) -> None:
        self._state, self._candidates, self._pages, self._chunk = state, candidates, pages, chunk

    def relieve(self, pipeline: PipelineState[ScheduledSequence], plan: StepPlan | None) -> bool:
        """Preempt as many sequences as the sequences that lack rows or pages need. Returns True if any was
        preempted: then planning should be repeated."""
        state = self._state
        if not self._pages.left_out and not len(state.waiting):
            return False
        holders = [seq for seq in state.active if not seq.preempting]
        needs = [Need(seq, pages) for seq, pages in self._pages.left_out.items()]
        needs += self._needs_to_start(holders)
        if not needs or not holders:
            return False
        chosen = giving_way(needs, *self._room(pipeline, plan, holders))
        stalled = plan is None and pipeline.is_empty
        if stalled and not chosen:
            chosen = [max(holders, key=rank)]
        for seq in chosen:
            state.preempt(seq)
        if stalled and state.num_allocated == 0:
            # Short of pages without any other sequence: the cache holds copies of the row's own pages. Drop it.
            state.manager.flush()
        return bool(chosen)

    def _needs_to_start(self, holders: Sequence[ScheduledSequence]) -> Iterator[Need]:
        """The waiting sequences that the next prefill step would start if sequences of worse priority gave way."""
        state, candidates = self._state, self._candidates
        first, worst = state.waiting.first(), max((seq.rank[0] for seq in holders), default=-math.inf)
        if first is None or first.rank[0] >= worst:
            return
        budget = self._chunk if state.running else state.config.max_num_batched_tokens
        ahead, adapters, slots_awaited = list(state.prefilling), set[str](), False
        for seq in candidates:
            if budget <= 0 or seq.rank[0] >= worst:
                return
            try:
                behind_long = candidates.is_long(seq) and any(map(candidates.is_long, ahead))
                if behind_long or candidates.awaits_chunks(seq, ahead):
                    continue
                pages = self._pages.to_start(seq)
                reused = state.reusable(seq)
            except Exception as error:
                candidates.fails(seq, error)
                continue
            if seq.adapter_key is not None:
                slots_awaited |= state.adapters.must_wait(seq.adapter_key, adapters)
                if slots_awaited:
                    continue
                adapters.add(seq.adapter_key)
            yield Need(seq, pages)
            ahead.append(seq)
            budget -= min(self._chunk, seq.prefill_target - reused)

    def _room(
        self,
        pipeline: PipelineState[ScheduledSequence],
        plan: StepPlan | None,
        holders: Sequence[ScheduledSequence],
    ) -> tuple[list[Holder], Room]:
        """The rows and pages of the holders, and the room that will be free once this plan and the steps in flight
        are completed."""
        state, manager = self._state, self._state.manager
        taken: dict[ScheduledSequence, Amount] = {}
        if plan is not None:
            lengths = plan.lengths or [1] * len(plan.sequences)
            taken = {seq: self._pages.new_pages(seq, n) for seq, n in zip(plan.sequences, lengths, strict=True)}
        held = []
        for seq in holders:
            more = taken.get(seq, 0)
            reserved = self._pages.missing(seq) - more if seq.is_prefilling else self._pages.headroom
            held.append(Holder(seq, manager.pages_held(seq.row) + more, reserved))
        ended = {seq for step in pipeline.steps() for seq in step.sequences if seq.finalized}
        leaving = [*ended, *(seq for seq in state.active if seq.preempting)]
        room = Room(
            rows=state.config.max_num_seqs - state.num_allocated + len(leaving),
            pages=manager.pages_available
            + sum(manager.pages_held(seq.row) for seq in leaving)
            - sum(taken.values()),
            reserved=sum(holder.reserved for holder in held),
        )
        return held, room
