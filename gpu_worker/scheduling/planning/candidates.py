"""Which waiting sequences may start, by rank, and which sequences of a plan get pages.

If anything raises while a plan looks at a waiting one, that request fails, and planning starts anew. Pages go to
the best-ranked sequences first. A sequence without pages is left out of the plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from petiole.cache import Amount
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.priorities.admission import can_reuse
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SchedulerState

LOOK_AHEAD = 64
"""How many waiting sequences beyond `max_num_seqs` to consider in one plan. Sequences that wait for an adapter, an
image, chunks or their turn are passed over. To pass over thousands in each plan would delay the running
sequences."""


class Candidates:
    """`broken`: the sequences that have raised, with their errors. `chunk`: the most positions of a chunk."""

    def __init__(self, state: SchedulerState, chunk: int) -> None:
        self._state, self._chunk = state, chunk
        self.broken: dict[ScheduledSequence, Exception] = {}

    def fails(self, seq: ScheduledSequence, error: Exception) -> None:
        self.broken.setdefault(seq, error)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Waiting sequences by rank. Once a sequence must wait for an adapter slot, later sequences with an
        adapter wait, too. Sequences without an adapter do not wait, because they delay nobody. Sequences whose
        images are being cut, or whose KV is being read, are passed over."""
        state, slots_awaited, now = self._state, False, time.perf_counter()
        for k, seq in enumerate(islice(state.waiting, state.config.max_num_seqs + LOOK_AHEAD)):
            slots_awaited |= state.adapters.must_wait(seq.adapter_key)
            if (slots_awaited and seq.adapter_key is not None) or seq in self.broken:
                continue
            try:
                at_hand = state.tier is None or state.tier.at_hand(seq, now, first=k == 0)
                at_hand = at_hand and (not seq.images or self._images_at_hand(seq, first=k == 0))
            except Exception as error:
                self.fails(seq, error)
                continue
            if at_hand:
                yield seq

    def _images_at_hand(self, seq: ScheduledSequence, *, first: bool) -> bool:
        """Whether all images of the sequence are cached or have crops. Starts to cut the images that do not."""
        if all(image.prepared is not None for image in seq.images.values()):
            return True
        state = self._state
        return state.cutting.at_hand(seq, state.reusable(seq), first=first)

    def is_long(self, seq: ScheduledSequence) -> bool:
        """Whether the prefill, without the reused prefix, takes more than one chunk."""
        if seq.prefill_target <= self._chunk:
            return False
        if seq.allocation is not None:
            return seq.prefill_target - seq.reused > self._chunk
        if seq.expected_reuse is None:
            seq.expected_reuse = self._state.reusable(seq)
        return seq.prefill_target - seq.expected_reuse > self._chunk

    def awaits_chunks(self, seq: ScheduledSequence, ahead: Sequence[ScheduledSequence]) -> bool:
        """Whether to wait because a sequence `ahead` computes at least half of the positions that this one needs.

        This sequence then reuses those chunks. A short shared prefix, such as a chat template's, is not worth the
        wait.
        """
        state, target = self._state, seq.prefill_target
        if state.config.prefix_cache == "off" or not ahead:
            return False
        matched = state.reusable(seq)
        shared_pages = state.manager.pages_needed(matched + (target - matched + 1) // 2)
        shared = shared_pages * state.limits.page_size
        # At least one position is always computed.
        return shared < target and any(can_reuse(seq, other, shared) for other in ahead)


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
