"""The scheduler: plans, launches, samples and commits steps.

    schedule_step(pipeline)            select the next step (`Planner`); may admit and preempt sequences
    launch_forward_async(plan, slot)   schedule the operations, freeze the batch, enqueue the forward
    finalize_sampling(handle, mask)    enqueue sampling and the copy to the host
    commit_step(step)                  wait for the copy (the only wait), apply the outcomes, end sequences

GPU progress (`scheduled_position`) advances at launch, committed progress (`kv_position`, tokens) at commit.
Budgets, pages and positions use the first; streaming, stop conditions, constraints and drafters use the second.

Errors: an exception before the forward is enqueued leaves everything as before the launch (`launching`), and the
loop goes on without the sequences whose own part in the step raises. So it does after an exception behind the
launch, in the host's part of a commit, for example: the request ends whose part that was. After each the books of
the pages are checked (`SchedulerState.audit`). The device's errors propagate to the engine, for which they are
fatal.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from petiole.cache import GroupedTable, KVCacheManager
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.request import TokenLogprobs
from petiole.gpu_worker.request.pooling import Pooled
from petiole.gpu_worker.request.prepared_images import PreparedImage, RequestImage
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.runtime.interface import (
    OF_TOKENS,
    VALUES,
    VECTORS,
    Runtime,
    StepBatch,
    StepOutput,
    TokenMask,
)
from petiole.gpu_worker.runtime.memory.kv_tier import KVTier
from petiole.gpu_worker.scheduling import masks
from petiole.gpu_worker.scheduling.batching import StepPayload, StepPlan, payload_of
from petiole.gpu_worker.scheduling.launching import Preparation
from petiole.gpu_worker.scheduling.pipeline import LaunchHandle, PendingCommit, PipelineState
from petiole.gpu_worker.scheduling.planning.planner import Planner
from petiole.gpu_worker.scheduling.priorities.admission import Cut, ResidentAdapters
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Extras, Generated, PromptScored, SchedulerState
from petiole.gpu_worker.scheduling.stopping import Finish
from petiole.gpu_worker.speculation import Price

logger = logging.getLogger(__name__)

Launch = LaunchHandle[ScheduledSequence]
Pending = PendingCommit[ScheduledSequence]


def _cut_here(image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
    raise AssertionError("nobody cuts images")


class Scheduler:
    """Runs on the engine thread. Independent of tensors, threads and text."""

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        manager: KVCacheManager,
        tracer: Tracer = NO_TRACE,
        cut: Cut = _cut_here,
        tier: KVTier | None = None,
    ) -> None:
        self.runtime = runtime
        self.manager = manager
        self.tracer = tracer
        adapters = ResidentAdapters(config.lora_slots, runtime.load_adapter)
        self.state = SchedulerState(config, runtime.limits, manager, adapters, runtime.forget_images, cut, tier)
        self._keys = itertools.count()
        self.planner = Planner(self.state)

    # ------------------------------------------------------------ plan

    def schedule_step(self, pipeline: PipelineState[ScheduledSequence]) -> StepPlan | None:
        """The next step to launch; None when the oldest in-flight step must be committed first."""
        now = time.perf_counter()
        try:
            return self.planner.schedule_step(pipeline, now)
        except Exception as error:  # a plan changes nothing but by steps that are whole in themselves
            self.state.faults.doubt(error)
            self.state.audit()
            return self.planner.schedule_step(pipeline, now)

    def schedule_decode_step(self, pipeline: PipelineState[ScheduledSequence]) -> StepPlan | None:
        """The next decode or verify step, or None. Changes no sequence."""
        return self.planner.schedule_decode_step(pipeline)

    # ------------------------------------------------------------ launch

    def launch_forward_async(self, plan: StepPlan, slot_id: int) -> Launch | None:
        """Launch a plan, or the part of it that can be launched. None if no part can: then nothing was launched,
        and its sequences have ended or start anew."""
        payload = self._prepare(plan, slot_id)
        if payload is None:
            return None
        plan = payload.plan
        handle = LaunchHandle(plan.kind, plan.sequences, payload)
        self.runtime.launch_forward(slot_id, payload.batch)
        state, counters = self.state, self.state.counters
        counters.steps += 1
        state.faults.surely(self.manager.table.on_sent, payload.batch.rows)
        if isinstance(self.manager.table, GroupedTable):
            state.faults.surely(self._slide, self.manager.table, payload.batch)
        state.faults.surely(self.planner.on_launch, plan)
        if plan.n_chunks:
            counters.prefill_steps += 1
            counters.prompt_tokens += int(payload.batch.lengths[plan.n_decodes :].sum())
            for seq in plan.chunks:
                state.faults.surely(self._on_chunk, seq)
        state.audit()
        return handle

    def _on_chunk(self, seq: ScheduledSequence) -> None:
        if seq.features:
            self._use_features(seq)
        if not seq.is_prefilling and seq in self.state.prefilling:
            self.state.running.append(seq)
            self.state.prefilling.remove(seq)

    @staticmethod
    def _slide(table: GroupedTable, batch: StepBatch) -> None:
        """Give back what lies behind the windows of the rows' later steps. Drafts may be rejected. All other
        positions will be committed."""
        table.slide(batch.rows, batch.earliest + batch.certain)

    def _prepare(self, plan: StepPlan, slot_id: int) -> StepPayload | None:
        """The host side of a launch. If it fails, each sequence of the plan is tried alone. Those that fail again
        are ended, and the others are tried together once more. None if nobody is left."""
        outcome = self._attempt(plan, slot_id)
        if isinstance(outcome, StepPayload):
            return outcome
        members = {seq for seq in plan.members if seq.is_planned}
        logger.error("a %s of %d requests could not be launched", plan.kind, len(members), exc_info=outcome)
        for seq in members:
            if seq.is_planned:
                self._failed(seq, self._attempt(plan.only({seq}), slot_id, trial=True))
        rest = {seq for seq in members if seq.is_planned}
        if not rest:
            return None
        outcome = self._attempt(plan.only(rest), slot_id)
        if isinstance(outcome, StepPayload):
            return outcome
        for seq in rest:
            self._failed(seq, outcome)
        return None

    def _failed(self, seq: ScheduledSequence, outcome: StepPayload | Exception) -> None:
        """End the request if an attempt has failed, unless it starts anew."""
        if isinstance(outcome, Exception) and seq.is_planned:
            self.state.fail(seq, outcome)

    def _attempt(self, plan: StepPlan, slot_id: int, *, trial: bool = False) -> StepPayload | Exception:
        """The prepared step, or the error. After an error or a trial, everything is as before."""
        drafts = self.state.config.speculative_tokens > 0
        preparation = Preparation(plan, self.manager, self._keys, drafts=drafts)
        try:
            outcome: StepPayload | Exception = preparation.prepare(slot_id, self.state.counters.steps)
        except Exception as error:
            outcome = error
        if not trial and isinstance(outcome, StepPayload):
            return outcome
        state = self.state
        try:
            if not preparation.undo():
                for seq in state.active:
                    if seq.allocation is not None and seq.allocation.stale and not seq.preempting:
                        state.preempt(seq)
        except Exception as error:
            state.faults.distrust(error)
            outcome = outcome if isinstance(outcome, Exception) else error  # the first one is the cause
        if isinstance(outcome, Exception):
            state.faults.doubt(outcome)
            if not state.audit():
                self._suspect(plan, outcome)
        return outcome

    def _suspect(self, plan: StepPlan, error: Exception) -> None:
        """A launch has left the books wrong, so all start anew. Those with a part in such a launch before end."""
        for seq in plan.members:
            if seq.suspect and not seq.finalized:
                self.state.fail(seq, error)
            seq.suspect = True

    def _use_features(self, seq: ScheduledSequence) -> None:
        """Forget the keys of the images whose positions have been launched: the runtime drops used embeddings."""
        for begin in list(seq.features):
            if begin + seq.images[begin].n_positions <= seq.scheduled_position:
                del seq.features[begin]
                seq.images[begin].forget()

    # ------------------------------------------------------------ sample

    def sampling_must_wait(self, handle: Launch, step: Pending) -> bool:
        """Whether `step` contains a constrained sequence of `handle`, whose mask depends on the step's outcome."""
        constrained = masks.awaiting_commit(handle.sequences, payload_of(handle).batch)
        return bool(constrained) and not set(step.sequences).isdisjoint(constrained)

    def compute_mask(self, handle: Launch) -> TokenMask | None:
        if not masks.constrained(handle.sequences):
            return None
        return masks.compute_mask(
            handle.sequences, payload_of(handle), self.state.limits.vocab_size, self.state.fail
        )

    def finalize_sampling(self, handle: Launch, mask: TokenMask | None) -> Pending:
        payload = payload_of(handle)
        transfer = self.runtime.launch_sampling(payload.slot_id, payload.batch, mask)
        return PendingCommit(handle.kind, handle.sequences, payload, transfer)

    # ------------------------------------------------------------ commit

    def commit_step(self, step: Pending) -> None:
        payload = payload_of(step)
        with self.tracer.span("wait", payload.slot_id, payload.step_id):
            output = step.transfer.wait()
        now = time.perf_counter()
        if payload.plan.n_chunks:
            if self.state.tier is not None:
                n_tokens = int(payload.batch.lengths[payload.plan.n_decodes :].sum())
                self.state.tier.on_prefill(n_tokens, now - payload.launched_s)
        elif step.kind == "encode":
            self.state.counters.encode_s += now - payload.launched_s
        with self.tracer.span("commit", payload.slot_id, payload.step_id):
            self._apply_all(step, payload, output, now)
            try:
                self.planner.on_commit(payload, now)
                for seq in payload.plan.chunks if payload.plan.n_chunks else ():
                    if seq.allocation is not None:
                        seq.allocation.share(seq.kv_position)
                if self.state.tier is not None:
                    for seq in step.sequences:
                        if seq.allocation is not None:
                            self.state.tier.follow(seq, seq.allocation)
            except Exception as error:  # shared less
                self.state.faults.doubt(error)
        self.state.audit()

    def _apply_all(self, step: Pending, payload: StepPayload, output: StepOutput, now: float) -> None:
        """Apply a step's outputs in batch order.

        For row i, `outputs[i]` tokens were sampled and the first `accepted[i]` are valid. They are applied up to
        the first token that ends the sequence.
        """
        state, out, all_decode = self.state, self.state.emissions, payload.plan.lengths is None
        tokens, accepted = output.token_ids.tolist(), output.accepted.tolist()
        outputs = payload.batch.outputs.tolist()
        if payload.batch.scored is not None:
            self._score(step, payload.batch.scored.counts.tolist(), output)
        with_extras = len(output.side_outputs) > 0 or output.logprobs is not None
        extras: Extras | None = None
        drafts: Iterable[Sequence[int]] = itertools.repeat(())
        if output.drafts is not None and (ahead := payload.batch.ahead) is not None:
            drafts = [made[:n] for made, n in zip(output.drafts.tolist(), ahead.tolist(), strict=True)]
        price: Price | None = None
        end = n_applied = 0
        for seq, sampled, n_valid, drafted in zip(step.sequences, outputs, accepted, drafts, strict=False):
            offset, end, outstanding = end, end + sampled, None
            try:
                outstanding = len(seq.outstanding)
                if seq.finalized:
                    state.counters.zombie_outputs += sampled
                    self._drop(seq)
                elif sampled == 0:
                    seq.apply_prefill()
                else:
                    fresh = tokens[offset : offset + n_valid]
                    n_kept, finish = seq.rules.cut(seq.generated, fresh)
                    if with_extras:
                        extras = _extras(seq, output, offset, n_kept)
                    del fresh[n_kept:]
                    if seq.constraint is not None:
                        fresh, finish = self._consume(seq, fresh, finish, extras)
                    if fresh:
                        if all_decode:
                            seq.apply_decode(fresh[0])
                        else:
                            seq.apply(fresh)
                            if sampled > 1:
                                state.counters.speculation.record(sampled - 1, len(fresh) - 1)
                                seq.draft_tokens += sampled - 1
                                seq.accepted_draft_tokens += len(fresh) - 1
                        n_applied += 0 if seq.request.pooled else len(fresh)
                        if seq.first_token_s is None:
                            seq.first_token_s = now
                        out.append(Generated(seq, fresh, extras and extras.keep(seq, len(fresh))))
                        if finish is not None:
                            state.finalize(seq, finish)
                        elif seq.drafter is not None and (sampled > 1 or len(seq.generated) >= seq.drafts_from):
                            price = price or self.planner.draft_price(len(outputs))
                            self._extend(seq, len(fresh), sampled - 1, drafted, price)
                if seq.preempting:
                    state.settle(seq)
            except Exception as error:
                self._spoilt(seq, error, outstanding)
        state.counters.generated_tokens += n_applied

    def _spoilt(self, seq: ScheduledSequence, error: Exception, outstanding: int | None) -> None:
        """A fault while the oldest of this many operations was applied, or before (None). The request ends, if it
        has not ended."""
        self.state.spoil(seq, error)
        if outstanding is None or seq.inflight_refs == outstanding:
            self._drop(seq)

    def _score(self, step: Pending, counts: list[int], output: StepOutput) -> None:
        """The log-probabilities of a prompt come before the output's first token. The prompt's first token has
        an entry, too, and nothing precedes it."""
        end = 0
        for seq, n in zip(step.sequences, counts, strict=True):
            offset, end = end, end + n
            if seq.finalized or not seq.wants_scores:
                continue
            try:
                entries = [] if seq.scored else [TokenLogprobs(seq.token(0), 0.0, [])]
                k = seq.request.sampling.prompt_logprobs or 0
                for at in range(offset, end):
                    assert output.scored_logprobs is not None
                    assert output.scored_ids is not None
                    assert output.scored_top is not None
                    top = zip(output.scored_ids[at, :k].tolist(), output.scored_top[at, :k].tolist(), strict=True)
                    token = seq.token(seq.scored + len(entries))
                    entries.append(TokenLogprobs(token, float(output.scored_logprobs[at]), list(top)))
                if entries:
                    self.state.emissions.append(PromptScored(seq, entries))
                seq.scored += len(entries)
            except Exception as error:
                self.state.fail(seq, error)

    def _consume(
        self, seq: ScheduledSequence, fresh: list[int], finish: Finish | None, extras: Extras | None
    ) -> tuple[list[int], Finish | None]:
        """Advance the constraint over the tokens. Returns the tokens up to its end, and how the sequence finishes.

        If the constraint raises, the request fails and no tokens are returned.
        """
        try:
            return masks.consume(seq, fresh, finish, extras.values if extras else None)
        except Exception as error:
            self.state.fail(seq, error)
            self._drop(seq)
            return [], None

    def _drop(self, seq: ScheduledSequence) -> None:
        """Discard the oldest operation of a finalized sequence."""
        seq.discard()
        self.state.settle(seq)

    def _extend(
        self, seq: ScheduledSequence, n_fresh: int, n_drafts: int, drafted: Sequence[int], price: Price
    ) -> None:
        """Pass a drafter the tokens since its rest began, of which the last n_fresh are this step's."""
        assert seq.drafter is not None
        try:
            seq.drafter.extend(seq.generated[seq.n_drafter_knows :], n_drafts, n_fresh - 1)
            if drafted:
                seq.drafter.offer(drafted)
            seq.n_drafter_knows = len(seq.generated)
            seq.drafts_from = seq.n_drafter_knows + seq.drafter.rests(price, in_flight=bool(seq.outstanding))
        except Exception as error:
            self.state.fail(seq, error)

    # ------------------------------------------------------------ reload and failure

    def requeue_all(self) -> None:
        """Preempt all sequences and flush the cache and the adapters, before new weights invalidate all KV.
        Requires an empty pipeline."""
        state = self.state
        self.manager.flush()
        for seq in state.active:
            state.preempt(seq)
        state.adapters.forget()

    def abandon(self, pipeline: PipelineState[ScheduledSequence]) -> None:
        """Release all sequences and cache nothing. Called after a device failure, once the device has been
        synchronized and all requests have ended."""
        state = self.state
        sequences = {*state.active, *(seq for step in pipeline.steps() for seq in step.sequences)}
        pipeline.abandon()
        self.manager.flush()
        for seq in sequences:
            seq.finalized = True
            while not seq.is_idle:
                seq.discard()
            if seq.allocation is not None:
                state.give_back(seq)
        state.clear()

    # ------------------------------------------------------------ checks

    def check_invariants(self, pipeline: PipelineState[ScheduledSequence]) -> None:
        """Check I4, I7 and that the sequence lists agree with the rows held. For tests and debug mode.

        Raises AssertionError.
        """
        self.manager.check()
        self.manager.check_running()
        steps_of = Counter(seq for step in pipeline.steps() for seq in step.sequences)
        known = {*self.state.active, *steps_of}
        for seq in known:
            steps = steps_of[seq]
            assert seq.inflight_refs == steps <= seq.max_outstanding, f"I4: {seq} is in {steps} steps"
            assert seq.allocation is not None, f"I7: {seq} has lost its row"
        rows = {seq.row for seq in known}
        assert len(rows) == len(known), "two sequences share a row"
        assert len(rows) == self.state.num_allocated, f"{self.state.num_allocated} rows held, {len(rows)} known"


def _extras(seq: ScheduledSequence, output: StepOutput, offset: int, n: int) -> Extras | None:
    """Log-probabilities and values of `n` outputs from `offset` on, or the vector of a text; None if the sequence
    has none of them."""
    if (vectors := output.side_outputs.get(VECTORS)) is not None:
        of_tokens = output.side_outputs.get(OF_TOKENS)
        more: Any = [()] * n if of_tokens is None else of_tokens[offset : offset + n]
        return Extras(pooled=[Pooled(vectors[offset + k].copy(), *more[k]) for k in range(n)])
    kinds, lines, numbers, values = seq.values, output.side_outputs.get(VALUES), None, None
    if kinds is not None and lines is not None:
        ids = output.token_ids[offset : offset + n].tolist()
        made = lines[offset : offset + n].tolist()
        numbers = [kinds.numbers(token_id, line) for token_id, line in zip(ids, made, strict=True)]
        values = [kinds.shown(token_id, of) for token_id, of in zip(ids, numbers, strict=True)]
    k = seq.request.sampling.beside
    if k is None or output.logprobs is None:
        return Extras(None, numbers, values) if numbers is not None else None
    logprobs = []
    for at in range(offset, offset + n):
        top: list[tuple[int, float]] = []
        if k and output.top_ids is not None and output.top_logprobs is not None:
            top = list(zip(output.top_ids[at, :k].tolist(), output.top_logprobs[at, :k].tolist(), strict=True))
        logprobs.append(TokenLogprobs(int(output.token_ids[at]), float(output.logprobs[at]), top))
    return Extras(logprobs, numbers, values)
