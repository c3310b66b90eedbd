"""Selects the sequences of the next step. Its side effects: admission, preemption, and failing broken requests: if
anything raises while a plan looks at a waiting sequence or asks a drafter, that request fails, and planning starts
anew.

Order: a step of prompts' chunks precedes decode steps. But while sequences are decoding, two steps without a
decode never follow each other, so a running sequence waits for at most one chunk, and for prompts that are more
urgent than all that decode. With the policy `mixed` it waits for none: every sequence that can decode does so
beside the chunks, in the same step. An encode of images goes before the prefill that needs them, and counts as a
prefill.

Within prefill, sequences go by rank, with one exception. A *long* prompt takes more than one chunk. After a step
with a chunk of a long prompt, the next prefill step takes short prompts first; long prompts get at least every
second step. No prefill step is launched before the step with the long prompt is committed, so that a short prompt
waits for at most one such step; but one for prompts that are more urgent than all that decode is. The steps of
`mixed` are shorter and hold decodes: there the next step does not wait, and chunks of long prompts fill it up.

The chunks of a step have one priority: a prompt waits for no chunk of a worse one, and for a shorter step while
more urgent prompts come and go (`priorities/recent.py`). While more urgent sequences decode, `batch_step_budget`
limits what the lowest class adds to their steps (`priorities/budget.py`).

Memory: pages go to the best-ranked sequences first. A sequence without pages is left out of the plan. Then as many
of the worst-ranked sequences are preempted as are needed, by the sequences left out and by those that the next
prefill step could start (`priorities/preemption.py`). The best-ranked sequence always makes progress, so sequences
cannot deadlock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from petiole.cache import Amount
from petiole.gpu_worker.constraints import ConstraintState
from petiole.gpu_worker.request.prepared_images import whole_regions
from petiole.gpu_worker.scheduling.admission import can_reuse
from petiole.gpu_worker.scheduling.batching import StepPlan, payload_of
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.priorities.budget import StepBudget
from petiole.gpu_worker.scheduling.priorities.preemption import Holder, Need, Room, giving_way
from petiole.gpu_worker.scheduling.priorities.recent import RecentDemand
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState

HEADROOM_TOKENS = 16
"""Tokens to keep free per running sequence when admitting another; with less, the new one is soon preempted."""

LOOK_AHEAD = 64
"""How many waiting sequences beyond `max_num_seqs` to consider in one plan. Sequences that wait for an adapter, an
image, chunks or their turn are passed over. To pass over thousands in each plan would delay the running
sequences."""


MOST_SCORED = 512
SCORED_NUMBERS = 2**25
"""At most this many positions of prompts are scored in a step, and their logits are at most this many numbers, but
for 64 positions. So neither a step's logits nor a delta of the prompt's log-probabilities grow with the chunk."""


class Planner:
    """Plans steps.

    `after_prefill`: whether the last launched step held chunks or images and no decode. `after_long`: whether the
    last step with chunks contained a long prompt.
    `left_out`: the sequences that did not get pages in this plan, and how many they need.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.after_prefill = False
        self.after_long = False
        self.left_out: dict[ScheduledSequence, Amount] = {}
        config = state.config
        self.budget = StepBudget(config.step_factor, 1 + config.speculative_tokens)
        self.recent_demand = RecentDemand()
        self._chunk = min(state.config.chunk_size, state.config.max_num_batched_tokens)
        self._most_scored = min(MOST_SCORED, max(64, SCORED_NUMBERS // state.limits.vocab_size))
        self._broken: dict[ScheduledSequence, Exception] = {}

    def on_launch(self, plan: StepPlan) -> None:
        self.after_prefill = plan.n_decodes == 0
        self.budget.on_launch(plan)
        if plan.n_chunks and (self._mixes or not plan.n_decodes):
            self.after_long = any(self._is_long(seq) for seq in plan.chunks)

    # ------------------------------------------------------------ kind of step

    def schedule_step(self, pipeline: PipelineState[ScheduledSequence], now: float) -> StepPlan | None:
        """The next step to launch; None when the oldest in-flight step must be committed first."""
        while True:
            self.left_out.clear()
            plan = self._choose(pipeline, now)
            again = not self._broken and self._relieve(pipeline, plan, now)
            if not self._broken and not again:
                return plan
            for seq, error in self._broken.items():
                self.state.spoil(seq, error)
            self._broken.clear()
            self.state.audit()

    def _choose(self, pipeline: PipelineState[ScheduledSequence], now: float) -> StepPlan | None:
        drain = self.state.config.prefill_policy == "drain"
        if drain and _chunks_in_flight(pipeline):
            return None
        if not pipeline.is_empty and self._others_leave():
            return None
        decode, urgent = self.schedule_decode_step(), self._urgent()
        streams = bool(self.state.running)
        mixes = self._mixes and decode is not None and not self.left_out
        behind_prompts = self.after_prefill and streams and (decode is not None or not pipeline.is_empty)
        behind_long = self.after_long and _chunks_in_flight(pipeline)
        waits = not mixes and (behind_prompts or (behind_long and not self._mixes))
        if waits and urgent is None:
            return decode
        if drain and not pipeline.is_empty:
            return None if self._wants_prefill(streams, now) else decode
        prefill = self._next_prefill(streams, now, decode, mixes)
        if waits and (prefill is None or prefill.members[0].rank[0] != urgent):
            return decode
        if prefill is None or (prefill.images and self.after_prefill and decode is not None):
            return decode
        if prefill.images or decode is None:
            return prefill
        return decode.beside(prefill) if mixes or self.budget.limits(prefill.chunks[0]) else prefill

    def _urgent(self) -> int | None:
        """The priority of the best prompt, if all sequences that decode have a worse one."""
        state, first = self.state, self.state.waiting.first()
        prompts = [seq for seq in state.prefilling if not seq.preempting]
        if first is not None:
            prompts.append(first)
        if not prompts or not state.running:
            return None
        best = min(seq.rank[0] for seq in prompts)
        return best if all(seq.rank[0] > best for seq in state.running) else None

    def _others_leave(self) -> bool:
        """Whether the first waiting sequence, more urgent than all others, waits for those that give way."""
        first, active = self.state.waiting.first(), self.state.active
        if first is None or not any(seq.preempting for seq in active):
            return False
        return all(seq.rank[0] > first.rank[0] for seq in active)

    @property
    def _mixes(self) -> bool:
        return self.state.config.prefill_policy == "mixed"

    def _wants_prefill(self, streams: bool, now: float) -> bool:
        """Whether a prefill step could start if the pipeline were empty."""
        state = self.state
        if state.prefilling:
            return True
        first = next(self._candidates(), None)
        if first is None or state.num_allocated >= state.config.max_num_seqs:
            return False
        try:
            return state.gate.is_open(state.waiting, streams, now) and self._fits(first, self._promised())
        except Exception as error:
            self._broken.setdefault(first, error)
            return False

    # ------------------------------------------------------------ decode and verify

    def schedule_decode_step(self) -> StepPlan | None:
        """The sequences whose next token can be computed now, with their drafts. Changes no sequence."""
        running = self.state.running
        sequences = [seq for seq in running if seq.can_decode and not seq.preempting]
        if self.budget.factor is not None:
            priorities = self.state.priorities
            sequences = self.budget.choose(sequences, running, None if priorities is None else priorities[1])
        if not sequences:
            return None
        if self.state.config.speculative_tokens == 0:
            sequences = self._with_pages(sequences, None)
            return StepPlan(sequences) if sequences else None
        sequences = [seq for seq in sequences if seq.is_idle or not self._promising(seq)]
        drafts = [self._drafts(seq) for seq in sequences]
        chosen = self._with_pages(sequences, [1 + len(d) for d in drafts])
        if not chosen:
            return None
        if len(chosen) < len(sequences):  # pages are short: do not spend them on drafts
            return StepPlan(chosen)
        if not any(drafts):
            return StepPlan(sequences)
        return StepPlan(sequences, [1 + len(d) for d in drafts], drafts)

    def _drafts(self, seq: ScheduledSequence) -> Sequence[int]:
        """Draft tokens for an idle sequence, within its token budget and cut where the constraint rejects one."""
        room = min(self.state.config.speculative_tokens, seq.remaining_tokens - 1)
        if seq.drafter is None or not seq.is_idle or room <= 0:
            return ()
        try:
            drafts = seq.drafter.propose(room)
            return drafts if seq.constraint is None else drafts[: _allowed(seq.constraint, drafts)]
        except Exception as error:  # a host-side error fails only this request
            self._broken.setdefault(seq, error)
            return ()

    def _promising(self, seq: ScheduledSequence) -> bool:
        """Whether the drafter has a draft, so that the sequence should become idle before it is verified."""
        try:
            return seq.drafter is not None and bool(seq.drafter.propose(1))
        except Exception as error:
            self._broken.setdefault(seq, error)
            return False

    def _with_pages(
        self, sequences: list[ScheduledSequence], lengths: Sequence[int] | None
    ) -> list[ScheduledSequence]:
        """The sequences for which enough pages are available; best ranks first if they do not suffice for all."""
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
                self.left_out[seq] = need
        return [seq for seq in sequences if seq in granted]

    def _new_pages(self, seq: ScheduledSequence, n_positions: int) -> Amount:
        return self.state.manager.new_pages(seq.row, seq.scheduled_position + n_positions)

    # ------------------------------------------------------------ prefill

    def _next_prefill(
        self,
        streams: bool,
        now: float,
        decode: StepPlan | None,
        mixes: bool,
    ) -> StepPlan | None:
        """The next chunks. If the step `mixes`, or the budget limits them, they run beside `decode`, if there is
        one. After a step with a long prompt short prompts come first."""
        orders = (True, False) if self.after_long else (False,)
        chunks: dict[ScheduledSequence, int] = {}
        for short_only in orders:
            if self._mixes or not chunks:
                self._add_chunks(chunks, streams, now, short_only, decode, mixes)
        if not chunks:
            return None
        plan = self._images_first(StepPlan(list(chunks), list(chunks.values()), n_chunks=len(chunks)))
        held_back = plan.images and self.budget.limits(plan.images[0][0]) and not self.budget.exempt
        return None if held_back else plan

    def _new_pages_of(self, plan: StepPlan | None) -> Amount:
        if plan is None:
            return 0
        lengths = plan.lengths or [1] * len(plan.sequences)
        return sum(self._new_pages(seq, n) for seq, n in zip(plan.sequences, lengths, strict=True))

    def _images_first(self, plan: StepPlan) -> StepPlan:
        """The prefill; if it needs images that are not encoded, an encode of as many of these as one step
        takes."""
        limits = self.state.limits.images
        if limits is None or plan.lengths is None:
            return plan
        needed, crops = list[tuple[ScheduledSequence, int]](), 0
        for seq, length in zip(plan.sequences, plan.lengths, strict=True):
            start = seq.scheduled_position
            for begin, image in seq.images.items():
                if start <= begin < start + length and begin not in seq.features:
                    crops += 0 if image.prepared is None else len(image.prepared.pixels)
                    if needed and crops > limits.max_crops:
                        return StepPlan([], images=needed)
                    needed.append((seq, begin))
        return StepPlan([], images=needed) if needed else plan

    def _add_chunks(
        self,
        chunks: dict[ScheduledSequence, int],
        streams: bool,
        now: float,
        short_only: bool,
        decode: StepPlan | None,
        mixes: bool,
    ) -> None:
        """Add chunks of the sequences in prefill, then of newly admitted ones, within the token budget. `decode`
        takes its pages first if the step `mixes` or the budget limits the chunks."""
        budget = self._chunk if streams else self.state.config.max_num_batched_tokens
        if (priorities := self.state.priorities) is not None:
            self.recent_demand.see(*priorities, now)
        promised, taken = sum(self._new_pages(seq, n) for seq, n in chunks.items()), None
        for seq in self._prefilling(streams, now, budget, chunks, short_only):
            room = min(self._chunk, budget - sum(chunks.values()), seq.prefill_target - seq.scheduled_position)
            room = self.budget.chunk(seq, room)
            if seq.wants_scores:
                room = min(room, self._most_scored - sum(n for one, n in chunks.items() if one.wants_scores))
            if seq.regions:
                room = whole_regions(seq.regions, seq.scheduled_position, room)
            most = self.recent_demand.most(seq.rank[0], budget, self._chunk, now)
            if room == 0 or (chunks and sum(chunks.values()) + room > most):
                break
            if taken is None:
                taken = self._new_pages_of(decode) if mixes or self.budget.limits(seq) else 0
            need = self._new_pages(seq, room)
            promised += need
            if promised + taken > self.state.manager.pages_available:
                self.left_out[seq] = need
                break
            self.budget.take_chunk(seq, room)
            chunks[seq] = room

    def _prefilling(
        self, streams: bool, now: float, budget: int, chunks: Mapping[ScheduledSequence, int], short_only: bool
    ) -> Iterable[ScheduledSequence]:
        """Admit waiting sequences more urgent than all in prefill, yield those in prefill by rank, then admit
        other waiting ones, while the caller has budget left.

        `chunks` are the chunks that the caller has so far: only sequences of the same priority go on with these.
        `short_only` skips long prompts. A sequence of a worse priority than a skipped one is not admitted, because
        it might have to give way at once.
        """
        state = self.state
        worst_priority = math.inf

        def is_full(seq: ScheduledSequence) -> bool:
            first = next(iter(chunks), seq)
            most = self.recent_demand.most(seq.rank[0], budget, self._chunk, now)
            return seq.rank[0] != first.rank[0] or sum(chunks.values()) >= most or not self.budget.chunk(seq, 1)

        def admitted(than: float) -> Iterator[ScheduledSequence]:
            """Admits the waiting sequences of a better priority than this one."""
            nonlocal worst_priority
            promised = self._promised()
            for seq in self._candidates():
                if seq.rank[0] >= than or seq.rank[0] > worst_priority or is_full(seq):
                    return
                try:
                    if (short_only and self._is_long(seq)) or self._awaits_chunks(seq, state.prefilling):
                        worst_priority = seq.rank[0]
                        continue
                    if not self._admit(seq, budget - sum(chunks.values()), now, promised):
                        return
                    promised += self._missing_pages(seq)
                except Exception as error:
                    self._broken.setdefault(seq, error)
                    return  # nobody else may start: planning begins anew
                yield seq

        opened = state.gate.is_open(state.waiting, streams, now)
        going_on = sorted((seq for seq in state.prefilling if not seq.preempting), key=_rank)
        if opened and going_on:
            yield from admitted(than=going_on[0].rank[0])
        for seq in going_on:
            if is_full(seq):
                return
            if seq in chunks:
                continue
            if short_only and self._is_long(seq):
                worst_priority = min(worst_priority, seq.rank[0])
            elif seq.inflight_refs < seq.max_outstanding:
                yield seq
        if opened:
            yield from admitted(than=math.inf)

    def _candidates(self) -> Iterator[ScheduledSequence]:
        """Waiting sequences by rank. Once a sequence must wait for an adapter slot, later sequences with an
        adapter wait, too. Sequences without an adapter do not wait, because they delay nobody. Sequences whose
        images are being cut are passed over."""
        state, slots_awaited = self.state, False
        for k, seq in enumerate(islice(state.waiting, state.config.max_num_seqs + LOOK_AHEAD)):
            slots_awaited |= state.adapters.must_wait(seq.adapter_key)
            if (slots_awaited and seq.adapter_key is not None) or seq in self._broken:
                continue
            try:
                at_hand = not seq.images or self._images_at_hand(seq, first=k == 0)
            except Exception as error:
                self._broken.setdefault(seq, error)
                continue
            if at_hand:
                yield seq

    def _images_at_hand(self, seq: ScheduledSequence, *, first: bool) -> bool:
        """Whether all images of the sequence are cached or have crops. Starts to cut the images that do not."""
        if all(image.prepared is not None for image in seq.images.values()):
            return True
        state = self.state
        n_cached = state.manager.match_length(seq.cache_tokens, seq.namespace)
        return state.cutting.at_hand(seq, n_cached, first=first)

    def _is_long(self, seq: ScheduledSequence) -> bool:
        """Whether the prefill, without the reused prefix, takes more than one chunk."""
        if seq.prefill_target <= self._chunk:
            return False
        if seq.blocks is not None:
            return seq.prefill_target - seq.reused > self._chunk
        if seq.expected_reuse is None:
            seq.expected_reuse = self.state.manager.match_length(seq.cache_tokens, seq.namespace)
        return seq.prefill_target - seq.expected_reuse > self._chunk

    def _awaits_chunks(self, seq: ScheduledSequence, ahead: Sequence[ScheduledSequence]) -> bool:
        """Whether to wait because a sequence `ahead` computes at least half of the positions that this one needs.

        This sequence then reuses those chunks. A short shared prefix, such as a chat template's, is not worth the
        wait.
        """
        state, target = self.state, seq.prefill_target
        if state.config.prefix_cache == "off" or not ahead:
            return False
        matched = state.manager.match_length(seq.cache_tokens, seq.namespace)
        shared_pages = state.manager.pages_needed(matched + (target - matched + 1) // 2)
        shared = shared_pages * state.limits.page_size
        # At least one position is always computed.
        return shared < target and any(can_reuse(seq, other, shared) for other in ahead)

    def _promised(self) -> Amount:
        """Pages that the sequences in prefill still need."""
        return sum(self._missing_pages(seq) for seq in self.state.prefilling)

    def _missing_pages(self, seq: ScheduledSequence) -> Amount:
        """Pages needed for the rest of the prefill."""
        return self._new_pages(seq, seq.prefill_target - seq.scheduled_position)

    def _admit(self, seq: ScheduledSequence, budget: int, now: float, promised: Amount) -> bool:
        """Admit a sequence. Returns False if it and all after it must wait."""
        state = self.state
        if state.num_allocated >= state.config.max_num_seqs or not self._fits(seq, promised):
            return False
        return state.start(seq, min(state.config.chunk_size, budget), now)

    def _fits(self, seq: ScheduledSequence, promised: Amount) -> bool:
        """Whether pages suffice for the whole prefill, the `promised` pages and the headroom of running sequences.

        Always true for a sequence that runs alone.
        """
        reserved = promised + len(self.state.running) * self._headroom
        return self._pages_to_start(seq) + reserved <= self.state.manager.pages_available

    def _pages_to_start(self, seq: ScheduledSequence) -> Amount:
        state = self.state
        target = seq.max_positions if state.config.reserve == "full" else seq.prefill_target
        return state.manager.pages_to_start(seq.cache_tokens, seq.namespace, target)

    @property
    def _headroom(self) -> int:
        """Pages to keep free for each running sequence."""
        return self.state.manager.pages_needed(HEADROOM_TOKENS)

    # ------------------------------------------------------------ preemption

    def _relieve(self, pipeline: PipelineState[ScheduledSequence], plan: StepPlan | None, now: float) -> bool:
        """Preempt as many sequences as the sequences that lack rows or pages need. Returns True if any was
        preempted: then planning should be repeated."""
        state = self.state
        if not self.left_out and not len(state.waiting):
            return False
        holders = [seq for seq in state.active if not seq.preempting]
        needs = [Need(seq, pages) for seq, pages in self.left_out.items()]
        needs += self._needs_to_start(holders, now)
        if not needs or not holders:
            return False
        chosen = giving_way(needs, *self._room(pipeline, plan, holders))
        stalled = plan is None and pipeline.is_empty
        if stalled and not chosen:
            chosen = [max(holders, key=_rank)]
        for seq in chosen:
            state.preempt(seq)
        if stalled and state.num_allocated == 0:
            # Short of pages without any other sequence: the cache holds copies of the row's own pages. Drop it.
            state.manager.flush()
        return bool(chosen)

    def _needs_to_start(self, holders: Sequence[ScheduledSequence], now: float) -> Iterator[Need]:
        """The waiting sequences that the next prefill step would start if sequences of worse priority gave way."""
        state, streams = self.state, bool(self.state.running)
        first, worst = state.waiting.first(), max((seq.rank[0] for seq in holders), default=-math.inf)
        if first is None or first.rank[0] >= worst or not state.gate.is_open(state.waiting, streams, now):
            return
        budget = self._chunk if streams else state.config.max_num_batched_tokens
        ahead, adapters, slots_awaited = list(state.prefilling), set[str](), False
        for seq in self._candidates():
            if budget <= 0 or seq.rank[0] >= worst:
                return
            try:
                if self._awaits_chunks(seq, ahead) or (self._is_long(seq) and any(map(self._is_long, ahead))):
                    continue
                pages = self._pages_to_start(seq)
                reused = state.manager.match_length(seq.cache_tokens, seq.namespace)
            except Exception as error:
                self._broken.setdefault(seq, error)
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
        state, manager = self.state, self.state.manager
        taken: dict[ScheduledSequence, Amount] = {}
        if plan is not None:
            lengths = plan.lengths or [1] * len(plan.sequences)
            taken = {seq: self._new_pages(seq, n) for seq, n in zip(plan.sequences, lengths, strict=True)}
        held = []
        for seq in holders:
            more = taken.get(seq, 0)
            reserved = self._missing_pages(seq) - more if seq.is_prefilling else self._headroom
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


def _chunks_in_flight(pipeline: PipelineState[ScheduledSequence]) -> bool:
    return any(payload_of(step).plan.n_chunks for step in pipeline.steps())


def _allowed(constraint: ConstraintState, drafts: Sequence[int]) -> int:
    """The number of leading drafts that the constraint accepts. Restores the constraint's state."""
    allowed = 0
    while allowed < len(drafts) and not constraint.finished and constraint.consume(drafts[allowed]):
        allowed += 1
    constraint.rollback(allowed)
    return allowed


def _rank(seq: ScheduledSequence) -> tuple[int, int]:
    return seq.rank
