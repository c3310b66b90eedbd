"""The pages of a plan: who needs how many, and who gets them.

Pages go to the best-ranked sequences first. A sequence without pages is left out of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from petiole.cache import Amount
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState

HEADROOM_TOKENS = 16
"""Tokens to keep free per running sequence when admitting another; with less, the new one is soon preempted."""


def rank(seq: ScheduledSequence) -> tuple[int, int]:
    return seq.rank


class PlannedPages:
    """`left_out`: the sequences that did not get pages in this plan, and how many they need."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.left_out: dict[ScheduledSequence, Amount] = {}

    def fit(self, sequences: Sequence[ScheduledSequence], lengths: Sequence[int] | None) -> bool:
        """Whether pages suffice for all. lengths: the positions of each; None if each has one."""
        available = self._state.manager.pages_available
        if (len(sequences) if lengths is None else sum(lengths)) <= available:
            return True
        sizes = lengths or [1] * len(sequences)
        return sum(map(self.new_pages, sequences, sizes)) <= available

    def granted(
        self, sequences: list[ScheduledSequence], lengths: Sequence[int] | None
    ) -> list[ScheduledSequence]:
        """The sequences for which enough pages are available; best ranks first if they do not suffice for all."""
        if self.fit(sequences, lengths):
            return sequences
        available, chosen = self._state.manager.pages_available, set()
        sizes = dict(zip(sequences, lengths or [1] * len(sequences), strict=True))
        for seq in sorted(sequences, key=rank):
            need = self.new_pages(seq, sizes[seq])
            if need <= available:
                available -= need
                chosen.add(seq)
            else:
                self.left_out[seq] = need
        return [seq for seq in sequences if seq in chosen]

    def new_pages(self, seq: ScheduledSequence, n_positions: int) -> Amount:
        return self._state.manager.new_pages(seq.row, seq.scheduled_position + n_positions)

    def new_pages_of(self, plan: StepPlan | None) -> Amount:
        if plan is None:
            return 0
        return sum(map(self.new_pages, plan.sequences, plan.lengths or [1] * len(plan.sequences)))

    def promised(self) -> Amount:
        """Pages that the sequences in prefill still need."""
        return sum(self.missing(seq) for seq in self._state.prefilling)

    def missing(self, seq: ScheduledSequence) -> Amount:
        """Pages needed for the rest of the prefill."""
        return self.new_pages(seq, seq.prefill_target - seq.scheduled_position)

    def suffice(self, seq: ScheduledSequence, promised: Amount) -> bool:
        """Whether pages suffice for the whole prefill, the `promised` pages and the headroom of running sequences.

        Always true for a sequence that runs alone.
        """
        reserved = promised + len(self._state.running) * self.headroom
        return self.to_start(seq) + reserved <= self._state.manager.pages_available

    def to_start(self, seq: ScheduledSequence) -> Amount:
        state = self._state
        target = seq.max_positions if state.config.reserve == "full" else seq.prefill_target
        return state.manager.pages_to_start(seq.cache_tokens, seq.namespace, target)

    @property
    def headroom(self) -> int:
        """Pages to keep free for each running sequence."""
        return self._state.manager.pages_needed(HEADROOM_TOKENS)
