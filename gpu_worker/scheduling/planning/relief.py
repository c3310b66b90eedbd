"""Who gives way. As many of the worst-ranked sequences are preempted as are needed, by the sequences that a plan
has left out and by those that the next prefill step could start (`priorities/preemption.py`). The best-ranked
sequence always makes progress, so sequences cannot deadlock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from petiole.cache import Amount
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.planning.candidates import Candidates
from petiole.gpu_worker.scheduling.planning.pages import PlannedPages, rank
from petiole.gpu_worker.scheduling.priorities.preemption import Holder, Need, Room, giving_way
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState


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
