"""The drafts of a step: who gets how many, and who must wait because of drafts in flight.

Drafts end within the sequence's token budget, and before the next snapshot of its states, which a decode makes. Of
an idle sequence they are cut where its constraint rejects one. What the runtime drafts behind a step in flight is
not known, so a constraint could not mask it, and such a sequence gets drafts when it is idle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from petiole.cache import GroupedTable
from petiole.gpu_worker.constraints import ConstraintState
from petiole.gpu_worker.scheduling.batching import payload_of
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.planning.candidates import Candidates
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState


class PlannedDrafts:
    """A drafter or a constraint that raises fails its own request alone, through `candidates`."""

    def __init__(self, state: SchedulerState, candidates: Candidates) -> None:
        self._candidates = candidates
        self._most, self._by_runtime = state.config.speculative_tokens, state.limits.drafts > 0
        table = state.manager.table
        self._states = table.states if isinstance(table, GroupedTable) else None

    def may_go_on(self, seq: ScheduledSequence) -> bool:
        """Whether a step of the sequence may be launched now. If not, those before are committed first."""
        if seq.is_idle or seq.drafter is None:
            return True
        if not seq.goes_ahead:
            return not self._proposed(seq, 1, None)
        if not seq.in_doubt:
            return True
        last = self._before_snapshot(seq)  # the decode that makes the snapshot begins where the host knows
        return last is None or seq.scheduled_position < last

    def of(
        self, sequences: Sequence[ScheduledSequence], pipeline: PipelineState[ScheduledSequence]
    ) -> list[Sequence[int]]:
        """The drafts of sequences that may go on, empty for those without. Changes no sequence."""
        launched = _launched(pipeline)
        return [self._of(seq, launched.get(seq)) for seq in sequences]

    def _of(self, seq: ScheduledSequence, launched: Sequence[int] | None) -> Sequence[int]:
        room = min(self._most - seq.n_repeated, seq.remaining_tokens - 1)
        if (last := self._before_snapshot(seq)) is not None:
            room = min(room, last - seq.scheduled_position - seq.n_repeated - 1)
        if not seq.is_idle and (not seq.goes_ahead or (seq.constraint is not None and self._by_runtime)):
            return ()
        drafts = self._proposed(seq, room, launched)
        if seq.constraint is None or not seq.is_idle:
            return drafts
        try:
            return drafts[: _allowed(seq.constraint, drafts)]
        except Exception as error:
            self._candidates.fails(seq, error)
            return ()

    def _proposed(self, seq: ScheduledSequence, count: int, launched: Sequence[int] | None) -> Sequence[int]:
        if seq.drafter is None or count <= 0:
            return ()
        try:
            return seq.drafter.propose(count, launched)
        except Exception as error:
            self._candidates.fails(seq, error)
            return ()

    def _before_snapshot(self, seq: ScheduledSequence) -> int | None:
        """The last position before the next regular snapshot of the sequence's states. None: there are none."""
        return None if self._states is None else self._states.before_next(seq.scheduled_position - seq.in_doubt)


def _launched(pipeline: PipelineState[ScheduledSequence]) -> dict[ScheduledSequence, Sequence[int]]:
    """The drafts of each sequence that a token is on its way for, in the newest of its steps."""
    found: dict[ScheduledSequence, Sequence[int]] = {}
    for step in pipeline.steps():
        payload = payload_of(step)
        drafts = payload.plan.drafts or itertools.repeat(())
        members = zip(step.sequences, payload.batch.outputs.tolist(), drafts, strict=False)
        found |= {seq: own for seq, outputs, own in members if outputs}
    return found


def _allowed(constraint: ConstraintState, drafts: Sequence[int]) -> int:
    """The number of leading drafts that the constraint accepts. Restores the constraint's state."""
    allowed = 0
    while allowed < len(drafts) and not constraint.finished and constraint.consume(drafts[allowed]):
        allowed += 1
    constraint.rollback(allowed)
    return allowed
