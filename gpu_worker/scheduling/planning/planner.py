"""Selects the sequences of the next step. Its side effects: admission, preemption, and failing broken requests.

Order: a step of prompts' chunks precedes decode steps. But while sequences are decoding, two steps without a
decode never follow each other, so a running sequence waits for at most one chunk, and for prompts that are more
urgent than all that decode. With the policy `mixed` it waits for none: every sequence that can decode does so
beside the chunks, in the same step. An encode of images goes before the prefill that needs them, and counts as a
prefill.

No prefill step is launched before the step with a chunk of a long prompt is committed, so that a short prompt
waits for at most one such step; but one for prompts that are more urgent than all that decode is. The steps of
`mixed` are shorter and hold decodes: there the next step does not wait, and chunks of long prompts fill it up."""

from __future__ import annotations

from petiole.gpu_worker.scheduling.batching import StepPayload, StepPlan, payload_of
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.planning.candidates import Candidates, PlannedPages
from petiole.gpu_worker.scheduling.planning.drafts import PlannedDrafts
from petiole.gpu_worker.scheduling.planning.prefill import PrefillPlanner
from petiole.gpu_worker.scheduling.planning.relief import Relief
from petiole.gpu_worker.scheduling.priorities.budget import StepBudget
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState
from petiole.gpu_worker.speculation import Price


class Planner:
    """Plans steps. `after_prefill`: whether the last launched step held chunks or images and no decode."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.after_prefill = False
        config = state.config
        chunk = min(config.chunk_size, config.max_num_batched_tokens)
        self.budget = StepBudget(config.step_factor, 1 + config.speculative_tokens)
        self._pages, self._candidates = PlannedPages(state), Candidates(state, chunk)
        self.prefill = PrefillPlanner(state, self.budget, self._candidates, self._pages, chunk)
        self._drafts = PlannedDrafts(state, self._candidates)
        self._relief = Relief(state, self._candidates, self._pages, chunk)

    def on_launch(self, plan: StepPlan) -> None:
        self.after_prefill = plan.n_decodes == 0
        self.budget.on_launch(plan)
        self.prefill.on_launch(plan)

    def on_commit(self, payload: StepPayload, now: float) -> None:
        self.budget.on_commit(payload, now)
        if self.state.config.speculative_tokens:
            self._drafts.price.on_commit(payload, now)

    def draft_price(self, n_sequences: int) -> Price:
        return self._drafts.price.of(n_sequences)

    # ------------------------------------------------------------ kind of step

    def schedule_step(self, pipeline: PipelineState[ScheduledSequence], now: float) -> StepPlan | None:
        """The next step to launch; None when the oldest in-flight step must be committed first."""
        while True:
            self._pages.left_out.clear()
            plan = self._choose(pipeline, now)
            again = not self._candidates.broken and self._relief.relieve(pipeline, plan)
            if plan is not None and not again:
                plan = self._drafts.behind(plan)
            if not self._candidates.broken and not again:
                return plan
            for seq, error in self._candidates.broken.items():
                self.state.spoil(seq, error)
            self._candidates.broken.clear()
            self.state.audit()

    def _choose(self, pipeline: PipelineState[ScheduledSequence], now: float) -> StepPlan | None:
        drain = self.state.config.prefill_policy == "drain"
        if drain and _chunks_in_flight(pipeline):
            return None
        if not pipeline.is_empty and self._others_leave():
            return None
        decode, urgent = self.schedule_decode_step(pipeline), self._urgent()
        streams = bool(self.state.running)
        mixes = self.prefill.mixes and decode is not None and not self._pages.left_out
        behind_prompts = self.after_prefill and streams and (decode is not None or not pipeline.is_empty)
        behind_long = self.prefill.after_long and _chunks_in_flight(pipeline)
        waits = not mixes and (behind_prompts or (behind_long and not self.prefill.mixes))
        if waits and urgent is None:
            return decode
        if drain and not pipeline.is_empty:
            return None if self.prefill.wanted() else decode
        prefill = self.prefill.next(streams, now, decode, mixes)
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

    # ------------------------------------------------------------ decode and verify

    def schedule_decode_step(self, pipeline: PipelineState[ScheduledSequence]) -> StepPlan | None:
        """The sequences whose next token can be computed now, with their drafts. Changes no sequence."""
        running = self.state.running
        sequences = [seq for seq in running if seq.can_decode and not seq.preempting]
        if self.budget.factor is not None:
            priorities = self.state.priorities
            sequences = self.budget.choose(sequences, running, None if priorities is None else priorities[1])
        if not sequences:
            return None
        drafts = None
        if self.state.config.speculative_tokens:
            sequences, drafts = self._drafts.among(sequences, pipeline)
        if drafts is None:
            sequences = self._pages.granted(sequences, None)
            return StepPlan(sequences) if sequences else None
        if not sequences:
            return None
        lengths = [1 + seq.n_repeated + len(d) for seq, d in zip(sequences, drafts, strict=True)]
        if not self._pages.fit(sequences, lengths):  # pages are short: do not spend them on drafts
            sequences = self._pages.granted(sequences, [1 + seq.n_repeated for seq in sequences])
            if not sequences:
                return None
            drafts, lengths = [()] * len(sequences), [1 + seq.n_repeated for seq in sequences]
        if max(lengths) == 1:
            return StepPlan(sequences)
        return StepPlan(sequences, lengths, drafts)


def _chunks_in_flight(pipeline: PipelineState[ScheduledSequence]) -> bool:
    return any(payload_of(step).plan.n_chunks for step in pipeline.steps())
