"""Which waiting sequences may start, by rank. If anything raises while a plan looks at one, that request fails,
and planning starts anew."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

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
