"""What the next step computes. Selection reads; the only effects here are admissions and preemptions.

Prefill goes first, but never twice in a row while sequences are decoding: a stream waits for one chunk at most.
Prefills go by rank; but nothing is prefilled behind a chunk of a *long* prompt, one that takes more than a chunk,
until that chunk is committed, and then the short ones have a step to themselves. So a short prompt, too, waits for
one such step at most, and a long one has every second prefill step.

Pages go to the best ranks first. A sequence that gets none is left out of the plan, and if a worse-ranked one
holds a row, that one is preempted, one at a time: the best-ranked sequence always gets on, so no two can wait for
each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gpu_worker.constraints import ConstraintState
from gpu_worker.errors import AdapterError
from gpu_worker.scheduling.admission import shared_prefix
from gpu_worker.scheduling.batching import StepPlan
from gpu_worker.scheduling.pipeline import PipelineState
from gpu_worker.scheduling.scheduled import ScheduledSequence
from gpu_worker.scheduling.state import SchedulerState

HEADROOM_TOKENS = 16
"""What must be left for each running sequence when another starts: with less, the newcomer is soon preempted."""


class Planner:
    """Chooses. `last_kind`: of the step launched last; `after_long`: did the last prefill compute a part of a long
    prompt? `left_out`: the best-ranked sequence that got no pages."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.last_kind = "decode"
        self.after_long = False
        self.left_out: ScheduledSequence | None = None
        self._chunk = min(state.config.chunk_size, state.config.max_num_batched_tokens)
        self._broken: list[tuple[ScheduledSequence, Exception]] = []

    def on_launch(self, plan: StepPlan) -> None:
        self.last_kind = plan.kind
        if plan.kind == "prefill":
            self.after_long = any(self._is_long(seq) for seq in plan.sequences)

    # ------------------------------------------------------------ the choice

    def schedule_step(self, pipeline: PipelineState[ScheduledSequence], now: float) -> StepPlan | None:
        """The next step to launch, or None: then the oldest step in flight must be committed first."""
        while True:
            self.left_out = None
            plan = self._choose(pipeline, now)
            if self._broken:
                for seq, error in self._broken:
                    self.state.fail(seq, error)
                self._broken.clear()
                continue
            if self.left_out is None or not self._relieve(
                self.left_out, stalled=pipeline.is_empty and plan is None
            ):
                return plan

    def _choose(self, pipeline: PipelineState[ScheduledSequence], now: float) -> StepPlan | None:
        drain = self.state.config.prefill_policy == "drain"
        if drain and any(step.kind == "prefill" for step in pipeline.steps()):
            return None
        decode = self.schedule_decode_step()
        streams = bool(self.state.running)
        if self.last_kind == "prefill" and streams and (decode is not None or not pipeline.is_empty):
            return decode
        if drain and not pipeline.is_empty:
            return None if self._wants_prefill(streams, now) else decode
        return self._next_prefill(pipeline, streams, now) or decode

    def _wants_prefill(self, streams: bool, now: float) -> bool:
        """Would a prefill start if the pipeline were empty?"""
        state = self.state
        if state.prefilling:
            return True
        first = state.waiting.first()
        return (
            first is not None
            and state.num_allocated < state.config.max_num_seqs
            and state.gate.is_open(state.waiting, streams, now)
            and self._fits(first, self._promised())
        )

    # ------------------------------------------------------------ decode and verify

    def schedule_decode_step(self) -> StepPlan | None:
        """A pure selector: the sequences whose next token can be computed now, with their drafts."""
        sequences = [seq for seq in self.state.running if seq.can_decode and not seq.preempting]
        if not sequences:
            return None
        if self.state.config.speculative_tokens == 0:
            sequences = self._with_pages(sequences, None)
            return StepPlan("decode", sequences) if sequences else None
        sequences = [seq for seq in sequences if seq.is_idle or not self._promising(seq)]
        drafts = [self._drafts(seq) for seq in sequences]
        chosen = self._with_pages(sequences, [1 + len(d) for d in drafts])
        if not chosen:
            return None
        if len(chosen) < len(sequences):  # pages are short: no time to gamble
            return StepPlan("decode", chosen)
        if not any(drafts):
            return StepPlan("decode", sequences)
        return StepPlan("verify", sequences, [1 + len(d) for d in drafts], drafts)

    def _drafts(self, seq: ScheduledSequence) -> Sequence[int]:
        """Guesses within the budget, as far as the constraint allows them."""
        room = min(self.state.config.speculative_tokens, seq.remaining_tokens - 1)
        if seq.drafter is None or not seq.is_idle or room <= 0:
            return ()
        try:
            drafts = seq.drafter.propose(room)
            return drafts if seq.constraint is None else drafts[: _allowed(seq.constraint, drafts)]
        except Exception as error:  # a host-side fault is this request's alone
            self._broken.append((seq, error))
            return ()

    def _promising(self, seq: ScheduledSequence) -> bool:
        """Is it worth letting the sequence come to rest, so that drafts can be verified?"""
        try:
            return seq.drafter is not None and bool(seq.drafter.propose(1))
        except Exception as error:
            self._broken.append((seq, error))
            return False

    def _with_pages(
        self, sequences: list[ScheduledSequence], lengths: Sequence[int] | None
    ) -> list[ScheduledSequence]:
        """Those that can have their pages, best ranks first when not all can."""
        manager = self.state.manager
        available = manager.pages_available
        if (len(sequences) if lengths is None else sum(lengths)) <= available:
            return sequences
        granted = set()
        sizes = dict(zip(sequences, lengths or [1] * len(sequences), strict=True))
        for seq in sorted(sequences, key=_rank):
            need = self._new_pages(seq, sizes[seq])
            if need <= available:
                available -= need
                granted.add(seq)
            else:
                self._leave_out(seq)
        return [seq for seq in sequences if seq in granted]

    def _new_pages(self, seq: ScheduledSequence, n_positions: int) -> int:
        manager = self.state.manager
        return max(
            0, manager.pages_needed(seq.scheduled_position + n_positions) - manager.table.page_count(seq.row)
        )

    def _leave_out(self, seq: ScheduledSequence) -> None:
        if self.left_out is None or seq.rank < self.left_out.rank:
            self.left_out = seq

    # ------------------------------------------------------------ prefill

    def _next_prefill(
        self, pipeline: PipelineState[ScheduledSequence], streams: bool, now: float
    ) -> StepPlan | None:
        """By rank; but once a chunk of a long prompt has been committed, the short ones that wait by then."""
        plan = None
        if self.after_long:
            if any(step.kind == "prefill" for step in pipeline.steps()):
                return None
            plan = self.schedule_prefill_step(streams, now, short_only=True)
        return plan or self.schedule_prefill_step(streams, now)

    def schedule_prefill_step(self, streams: bool, now: float, short_only: bool = False) -> StepPlan | None:
        """Chunks of those that are being prefilled, and of those that can be admitted behind them."""
        budget = self._chunk if streams else self.state.config.max_num_batched_tokens
        sequences: list[ScheduledSequence] = []
        lengths: list[int] = []
        promised = 0
        for seq in self._prefilling(streams, now, budget, lengths, short_only):
            room = min(self._chunk, budget - sum(lengths), seq.prefill_target - seq.scheduled_position)
            promised += self._new_pages(seq, room)
            if promised > self.state.manager.pages_available:
                self._leave_out(seq)
                break
            sequences.append(seq)
            lengths.append(room)
            if sum(lengths) >= budget:
                break
        return StepPlan("prefill", sequences, lengths) if sequences else None

    def _prefilling(
        self, streams: bool, now: float, budget: int, lengths: list[int], short_only: bool
    ) -> Iterable[ScheduledSequence]:
        """Started ones first, by rank; then each that is admitted while the caller still has budget.
        `short_only`: long ones are passed over, but for nobody of a worse priority. Behind one that waits for an
        adapter slot, those with adapters wait, too; those without prolong nothing, and go on."""
        state = self.state
        worst_priority = math.inf
        for seq in sorted(state.prefilling, key=_rank):
            if short_only and self._is_long(seq):
                worst_priority = min(worst_priority, seq.rank[0])
            elif seq.inflight_refs < seq.max_outstanding and not seq.preempting:
                yield seq
        if not state.gate.is_open(state.waiting, streams, now):
            return
        promised = self._promised()
        slots_awaited = False
        for seq in state.waiting.head(state.config.max_num_seqs):
            if seq.rank[0] > worst_priority:
                return
            if short_only and self._is_long(seq):
                worst_priority = seq.rank[0]
                continue
            slots_awaited |= state.adapters.must_wait(seq.adapter_key)
            if self._awaits_chunks(seq) or (slots_awaited and seq.adapter_key is not None):
                continue
            if not self._admit(seq, budget - sum(lengths), now, promised):
                return
            if seq.finalized:
                continue
            promised += self._missing_pages(seq)
            yield seq

    def _is_long(self, seq: ScheduledSequence) -> bool:
        """Does its prefill take more than one chunk?"""
        if seq.prefill_target <= self._chunk:
            return False
        if seq.allocation is not None:
            return seq.prefill_target - seq.allocation.reused > self._chunk
        if seq.expected_reuse is None:
            seq.expected_reuse = self.state.manager.match_length(seq.cache_tokens, seq.namespace)
        return seq.prefill_target - seq.expected_reuse > self._chunk

    def _awaits_chunks(self, seq: ScheduledSequence) -> bool:
        """Is most of what it would compute being computed for another? Then it waits for those chunks and reuses
        them. A short common beginning (a chat template's) is not worth a step's wait."""
        state = self.state
        if state.config.prefix_cache == "off" or not state.prefilling:
            return False
        shared = max(shared_prefix(other, seq, state.limits.page_size) for other in state.prefilling)
        if shared == 0:
            return False
        matched = state.manager.match_length(seq.cache_tokens, seq.namespace)
        return 2 * (shared - matched) >= seq.prefill_target - matched

    def _promised(self) -> int:
        """Pages that those that are being prefilled are about to need."""
        return sum(self._missing_pages(seq) for seq in self.state.prefilling)

    def _missing_pages(self, seq: ScheduledSequence) -> int:
        """For the rest of its prefill."""
        return self._new_pages(seq, seq.prefill_target - seq.scheduled_position)

    def _admit(self, seq: ScheduledSequence, budget: int, now: float, promised: int) -> bool:
        """Start one. False: it must wait, and so must all behind it. A broken adapter ends that request."""
        state = self.state
        if state.num_allocated >= state.config.max_num_seqs or not self._fits(seq, promised):
            worst = max(state.active, key=_rank, default=None)
            if worst is not None and worst.rank[0] > seq.rank[0]:
                self._leave_out(seq)
            return False
        try:
            return state.start(seq, min(state.config.chunk_size, budget), now)
        except AdapterError as error:
            state.finalize(seq, error)
            return True

    def _fits(self, seq: ScheduledSequence, promised: int) -> bool:
        """Are there pages for the whole prefill, beyond the `promised` ones and what running sequences will soon
        need? Alone, it always fits."""
        state, manager = self.state, self.state.manager
        target = seq.max_positions if state.config.reserve == "full" else seq.prefill_target
        spare = len(state.running) * manager.pages_needed(HEADROOM_TOKENS) + promised
        wanted = target + spare * manager.table.page_size
        limit = manager.table.max_pages_per_row * manager.table.page_size
        if wanted > limit and manager.pages_available < manager.pages_needed(wanted):
            return False
        return manager.can_start(seq.cache_tokens, seq.namespace, kv_length=min(wanted, limit))

    # ------------------------------------------------------------ pressure

    def _relieve(self, starving: ScheduledSequence, stalled: bool) -> bool:
        """Make room for a starving sequence. True: something is free now, plan again."""
        state = self.state
        if state.num_zombies or any(seq.preempting for seq in state.active):
            return False  # pages are on their way back already
        worst = max(state.active, key=_rank, default=None)
        if worst is None or (worst.rank <= starving.rank and not stalled):
            return False
        state.preempt(worst)
        if stalled and state.num_allocated == 0:
            # Alone, and still short: the cache holds copies of pages that the row has as well. Start from nothing.
            state.manager.flush()
        return worst.blocks is None


def _allowed(constraint: ConstraintState, drafts: Sequence[int]) -> int:
    """How many leading drafts the constraint lets pass. Leaves it as it was."""
    allowed = 0
    while allowed < len(drafts) and not constraint.finished and constraint.consume(drafts[allowed]):
        allowed += 1
    constraint.rollback(allowed)
    return allowed


def _rank(seq: ScheduledSequence) -> tuple[int, int]:
    return seq.rank
