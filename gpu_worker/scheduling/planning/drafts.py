"""The drafts of a step: who gets how many, and who must wait because of drafts in flight.

Drafts end within the sequence's token budget, and before the next snapshot of its states, which a decode makes. Of
an idle sequence they are cut where its constraint rejects one.

Some sequences have drafts only once their steps in flight are committed: where the runtime does not go ahead; if
the drafts depend on tokens in flight that are too uncertain; and if the runtime makes them unseen, so that a
constraint could not mask them. Such a sequence waits if its drafts will bring more than that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petiole.cache import GroupedTable
from petiole.gpu_worker.constraints import ConstraintState
from petiole.gpu_worker.scheduling.batching import StepPlan, payload_of
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.planning.candidates import Candidates
from petiole.gpu_worker.scheduling.priorities.draft_price import DraftPrice
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState
from petiole.gpu_worker.speculation import Launched, Price


class PlannedDrafts:
    """A drafter or a constraint that raises fails its own request alone, through `candidates`."""

    def __init__(self, state: SchedulerState, candidates: Candidates) -> None:
        self._candidates = candidates
        self._most, self._by_runtime = state.config.speculative_tokens, state.limits.drafts > 0
        table = state.manager.table
        self._states = table.states if isinstance(table, GroupedTable) else None
        self.price = DraftPrice()

    def among(
        self, sequences: list[ScheduledSequence], pipeline: PipelineState[ScheduledSequence]
    ) -> tuple[list[ScheduledSequence], list[Sequence[int]] | None]:
        """The sequences that need not wait, and the drafts of each, which may be none. None: nobody has any, and
        nobody repeats inputs. Changes no sequence."""
        asked = [seq for seq in sequences if seq.asks_for_drafts]
        # Where there are states, a sequence may have to wait for a snapshot, and repeats what was rejected.
        everybody = self._states is not None
        if not asked and not everybody:
            return sequences, None
        price = self.price.of(len(sequences))
        worth = {seq: n for seq in asked if (n := self._worth(seq, price))}
        if not worth and not everybody:
            return sequences, None
        launched = _launched(pipeline)
        found = [
            (seq, self._of(seq, worth.get(seq, 0), price, launched.get(seq)) if everybody or seq in worth else ())
            for seq in sequences
        ]
        going = [(seq, drafts) for seq, drafts in found if drafts is not None]
        return [seq for seq, _ in going], [drafts for _, drafts in going]

    def _worth(self, seq: ScheduledSequence, price: Price) -> int:
        assert seq.drafter is not None
        try:
            return seq.drafter.worth(price, in_flight=bool(seq.outstanding))
        except Exception as error:
            self._candidates.fails(seq, error)
            return 0

    def behind(self, plan: StepPlan) -> StepPlan:
        """The plan with what the runtime is to draft behind it."""
        if not self._by_runtime:
            return plan
        asked = [(i, seq) for i, seq in enumerate(plan.sequences) if seq.asks_for_drafts]
        if not asked:
            return plan
        price, ahead = self.price.of(len(plan.sequences)), [0] * len(plan.sequences)
        for i, seq in asked:
            ahead[i] = self._wanted(seq, price, len(plan.drafts[i]) if plan.drafts else 0)
        return replace(plan, ahead=ahead) if any(ahead) else plan

    def _of(
        self, seq: ScheduledSequence, worth: int, price: Price, launched: Launched | None
    ) -> Sequence[int] | None:
        """The drafts of a sequence, at most as many as are worth their price. None: it waits. launched: see
        `Drafter.propose`."""
        if seq.drafter is None:
            return ()
        room = min(worth, self._most, seq.remaining_tokens - 1)
        if self._states is not None:
            room = min(room, self._most - seq.n_repeated)
            last = self._states.before_next(seq.scheduled_position - seq.in_doubt)
            if last is not None:
                room = min(room, last - seq.scheduled_position - seq.n_repeated - 1)
                if seq.in_doubt and seq.scheduled_position >= last:
                    return None  # the decode that makes the snapshot begins where the host knows
        if room <= 0:
            return ()
        try:
            if seq.is_idle:
                drafts = seq.drafter.propose(room)
                assert drafts is not None, "nothing is in flight"
                return drafts if seq.constraint is None else drafts[: _allowed(seq.constraint, drafts)]
            drafts = seq.drafter.propose(room, launched)
            if drafts is None or (drafts and self._needs_commit(seq)):
                return None if price.pays(seq.drafter.expects(room), room) else ()
            return drafts
        except Exception as error:
            self._candidates.fails(seq, error)
            return ()

    def _needs_commit(self, seq: ScheduledSequence) -> bool:
        """Whether drafts of the sequence follow what is committed alone."""
        return not seq.goes_ahead or (self._by_runtime and seq.constraint is not None)

    def _wanted(self, seq: ScheduledSequence, price: Price, n_drafts: int) -> int:
        """See `Drafter.wanted`. The next step verifies none of them if its first token is the last one."""
        assert seq.drafter is not None
        room = min(self._most, seq.remaining_tokens - n_drafts - 2)
        if room <= 0:
            return 0
        try:
            return seq.drafter.wanted(room, price, waits=self._needs_commit(seq))
        except Exception as error:
            self._candidates.fails(seq, error)
            return 0


def _launched(pipeline: PipelineState[ScheduledSequence]) -> dict[ScheduledSequence, Launched]:
    """What is in flight of each sequence that a token is on its way for, in the newest of its steps."""
    found: dict[ScheduledSequence, Launched] = {}
    for step in pipeline.steps():
        plan, batch = payload_of(step).plan, payload_of(step).batch
        n = len(step.sequences)
        drafts, made = plan.drafts or [()] * n, [0] * n if batch.ahead is None else batch.ahead.tolist()
        for seq, outputs, *own in zip(step.sequences, batch.outputs.tolist(), drafts, made, strict=True):
            if outputs:
                found[seq] = Launched(*own)
    return found


def _allowed(constraint: ConstraintState, drafts: Sequence[int]) -> int:
    """The number of leading drafts that the constraint accepts. Restores the constraint's state."""
    allowed = 0
    while allowed < len(drafts) and not constraint.finished and constraint.consume(drafts[allowed]):
        allowed += 1
    constraint.rollback(allowed)
    return allowed
