"""The next step of prompts' chunks, or of the images that they need.

Sequences go by rank, with one exception. A *long* prompt takes more than one chunk. After a step with a chunk of a
long prompt, the next prefill step takes short prompts first; long prompts get at least every second step.

The chunks of a step have one priority: a prompt waits for no chunk of a worse one, and for a shorter step while
more urgent prompts come and go (`RecentDemand`). While more urgent sequences decode, `batch_step_budget`
limits what the lowest class adds to their steps (`priorities/budget.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from petiole.cache import Amount
from petiole.gpu_worker.request.prepared_images import whole_regions
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.planning.candidates import Candidates, PlannedPages, rank
from petiole.gpu_worker.scheduling.priorities.budget import StepBudget
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState

RECENT_S = 60.0
PART = 8

MOST_SCORED = 512
SCORED_NUMBERS = 2**25
"""At most this many positions of prompts are scored in a step, and their logits are at most this many numbers, but
for 64 positions. So neither a step's logits nor a delta of the prompt's log-probabilities grow with the chunk."""


@dataclass(slots=True)
class RecentDemand:
    """Whether more urgent requests come and go beside the lowest priority class.

    A request that arrives waits for the step that is computed, and one that decodes for every second step of
    prompts. While more urgent ones come and go, a step of the lowest class has one prompt's chunk, or several that
    are no more than an eighth of a chunk together. A batch alone fills its steps: that is quicker wherever most of
    a step's time goes into reading the weights. `lowest`: the class of the worst priority when somebody more
    urgent was last seen, before `until_s`."""

    lowest: float = math.inf
    until_s: float = -math.inf

    def see(self, best: int, worst: int, now: float) -> None:
        """The best and the worst priority of all requests at this time."""
        if best < worst:
            self.lowest, self.until_s = worst, now + RECENT_S

    def most(self, priority: int, positions: int, chunk: int, now: float) -> int:
        """How many positions several prompts of this priority may have in a step that may have `positions`."""
        limited = priority >= self.lowest and now < self.until_s
        return min(positions, max(1, chunk // PART)) if limited else positions


class PrefillPlanner:
    """`after_long`: whether the last step with chunks contained a long prompt."""

    def __init__(
        self, state: SchedulerState, budget: StepBudget, candidates: Candidates, pages: PlannedPages, chunk: int
    ) -> None:
        self._state, self._budget, self._candidates, self._pages = state, budget, candidates, pages
        self.after_long = False
        self._recent_demand = RecentDemand()
        self._chunk = chunk
        self._most_scored = min(MOST_SCORED, max(64, SCORED_NUMBERS // state.limits.vocab_size))

    def on_launch(self, plan: StepPlan) -> None:
        if plan.n_chunks and (self.mixes or not plan.n_decodes):
            self.after_long = any(self._candidates.is_long(seq) for seq in plan.chunks)

    @property
    def mixes(self) -> bool:
        return self._state.config.prefill_policy == "mixed"

    def wanted(self) -> bool:
        """Whether a prefill step could start if the pipeline were empty."""
        state = self._state
        if state.prefilling:
            return True
        first = next(iter(self._candidates), None)
        if first is None or state.num_allocated >= state.config.max_num_seqs:
            return False
        try:
            return self._pages.suffice(first, self._pages.promised())
        except Exception as error:
            self._candidates.fails(first, error)
            return False

    def next(
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
            if self.mixes or not chunks:
                self._add_chunks(chunks, streams, now, short_only, decode, mixes)
        if not chunks:
            return None
        plan = self._images_first(StepPlan(list(chunks), list(chunks.values()), n_chunks=len(chunks)))
        held_back = plan.images and self._budget.limits(plan.images[0][0]) and not self._budget.exempt
        return None if held_back else plan

    def _images_first(self, plan: StepPlan) -> StepPlan:
        """The prefill; if it needs images that are not encoded, an encode of as many of these as one step
        takes."""
        limits = self._state.limits.images
        if limits is None or plan.lengths is None:
            return plan
        needed, crops = list[tuple[ScheduledSequence, int]](), 0
        for seq, length in zip(plan.sequences, plan.lengths, strict=True):
            start = seq.scheduled_position
            for begin, image in seq.images.items():
                meets = begin < start + length and start < begin + image.n_positions
                if meets and begin not in seq.features:
                    crops += 0 if image.prepared is None else image.prepared.n_encoded
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
        budget = self._chunk if streams else self._state.config.max_num_batched_tokens
        if (priorities := self._state.priorities) is not None:
            self._recent_demand.see(*priorities, now)
        promised, taken = sum(self._pages.new_pages(seq, n) for seq, n in chunks.items()), None
        for seq in self._prefilling(now, budget, chunks, short_only):
            room = min(self._chunk, budget - sum(chunks.values()), seq.prefill_target - seq.scheduled_position)
            room = self._budget.chunk(seq, room)
            if seq.wants_scores:
                room = min(room, self._most_scored - sum(n for one, n in chunks.items() if one.wants_scores))
            if seq.regions:
                room = whole_regions(seq.regions, seq.scheduled_position, room)
            most = self._recent_demand.most(seq.rank[0], budget, self._chunk, now)
            if room == 0 or (chunks and sum(chunks.values()) + room > most):
                break
            if taken is None:
                taken = self._pages.new_pages_of(decode) if mixes or self._budget.limits(seq) else 0
            need = self._pages.new_pages(seq, room)
            promised += need
            if promised + taken > self._state.manager.pages_available:
                self._pages.left_out[seq] = need
                break
            self._budget.take_chunk(seq, room)
            chunks[seq] = room

    def _prefilling(
        self, now: float, budget: int, chunks: Mapping[ScheduledSequence, int], short_only: bool
    ) -> Iterable[ScheduledSequence]:
        """Admit waiting sequences more urgent than all in prefill, yield those in prefill by rank, then admit
        other waiting ones, while the caller has budget left.

        `chunks` are the chunks that the caller has so far: only sequences of the same priority go on with these.
        `short_only` skips long prompts. A sequence of a worse priority than a skipped one is not admitted, because
        it might have to give way at once.
        """
        state, candidates = self._state, self._candidates
        worst_priority = math.inf

        def is_full(seq: ScheduledSequence) -> bool:
            first = next(iter(chunks), seq)
            most = self._recent_demand.most(seq.rank[0], budget, self._chunk, now)
            return seq.rank[0] != first.rank[0] or sum(chunks.values()) >= most or not self._budget.chunk(seq, 1)

        def admitted(than: float) -> Iterator[ScheduledSequence]:
            """Admits the waiting sequences of a better priority than this one."""
            nonlocal worst_priority
            promised = self._pages.promised()
            for seq in candidates:
                if seq.rank[0] >= than or seq.rank[0] > worst_priority or is_full(seq):
                    return
                try:
                    passed = short_only and candidates.is_long(seq)
                    if passed or candidates.awaits_chunks(seq, state.prefilling):
                        worst_priority = seq.rank[0]
                        continue
                    if not self._admit(seq, budget - sum(chunks.values()), now, promised):
                        return
                    promised += self._pages.missing(seq)
                except Exception as error:
                    candidates.fails(seq, error)
                    return  # nobody else may start: planning begins anew
                yield seq

        going_on = sorted((seq for seq in state.prefilling if not seq.preempting), key=rank)
        if going_on:
            yield from admitted(than=going_on[0].rank[0])
        for seq in going_on:
            if is_full(seq):
                return
            if seq in chunks:
                continue
            if short_only and candidates.is_long(seq):
                worst_priority = min(worst_priority, seq.rank[0])
            elif seq.inflight_refs < seq.max_outstanding:
                yield seq
        yield from admitted(than=math.inf)

    def _admit(self, seq: ScheduledSequence, budget: int, now: float, promised: Amount) -> bool:
        """Admit a sequence. Returns False if it and all after it must wait."""
        state = self._state
        if state.num_allocated >= state.config.max_num_seqs or not self._pages.suffice(seq, promised):
            return False
        return state.start(seq, min(state.config.chunk_size, budget), now)
