"""The drafts of a step: who gets how many, and who must wait because of drafts in flight.

Drafts end within the sequence's token budget, and before the next snapshot of its states, which a decode makes. Of
an idle sequence they are cut where its constraint rejects one.

A sequence waits for its steps in flight if it has drafts only once these are committed: where the runtime does not
go ahead; if the drafts depend on tokens in flight that are too uncertain; and if the runtime makes them unseen, so
that a constraint could not mask them."""

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

    def among(
        self, sequences: Sequence[ScheduledSequence], pipeline: PipelineState[ScheduledSequence]
    ) -> tuple[list[ScheduledSequence], list[Sequence[int]]]:
        """The sequences that need not wait, and the drafts of each, which may be none. Changes no sequence."""
        launched = _launched(pipeline)
        found = ((seq, self._of(seq, launched.get(seq))) for seq in sequences)
        going = [(seq, drafts) for seq, drafts in found if drafts is not None]
        return [seq for seq, _ in going], [drafts for _, drafts in going]

    def _of(self, seq: ScheduledSequence, launched: Sequence[int] | None) -> Sequence[int] | None:
        """The drafts of a sequence. None: it waits. launched: see `Drafter.propose`."""
        if seq.drafter is None:
            return ()
        room = min(self._most - seq.n_repeated, seq.remaining_tokens - 1)
        if self._states is not None:
            last = self._states.before_next(seq.scheduled_position - seq.in_doubt)
            if last is not None:
                room = min(room, last - seq.scheduled_position - seq.n_repeated - 1)
                if seq.in_doubt and seq.scheduled_position >= last:
                    return None  # the decode that makes the snapshot begins where the host knows
        if room <= 0:
            return ()
        if seq.is_idle:
            return self._allowed(seq, self._proposed(seq, room, None))
        unmasked = seq.constraint is not None and self._by_runtime
        drafts = self._proposed(seq, room, launched) if seq.goes_ahead and not unmasked else ()
        return None if not drafts and self._proposed(seq, 1, None) else drafts

    def _allowed(self, seq: ScheduledSequence, drafts: Sequence[int]) -> Sequence[int]:
        if seq.constraint is None:
            return drafts
        try:
            return drafts[: _allowed(seq.constraint, drafts)]
        except Exception as error:
            self._candidates.fails(seq, error)
            return ()

    def _proposed(self, seq: ScheduledSequence, count: int, launched: Sequence[int] | None) -> Sequence[int]:
        assert seq.drafter is not None
        try:
            return seq.drafter.propose(count, launched)
        except Exception as error:
            self._candidates.fails(seq, error)
            return ()


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
