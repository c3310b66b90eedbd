"""Drafts that the runtime makes: a head of the model drafts behind the sampling of each step.

The runtime drafts in every step, so its drafts after the last committed token are always known. Those behind a
step in flight stay where they are made, and the next step reads them there. What is left to do here is to count
how often they were right: drafts that are wrong are not worth a verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.gpu_worker.speculation.proposer import LATEST, TRUST_AT_FIRST, worthwhile


@dataclass(frozen=True, slots=True)
class HeadProposer:
    """unseen: what stands in a step for each draft that only the runtime knows."""

    unseen: Sequence[int] = ()

    def drafter(self, tokens: Sequence[int]) -> HeadDrafter:
        return HeadDrafter(self.unseen)


class HeadDrafter:
    """The drafts after the last committed token of one sequence. `trust`: as in `ngram`."""

    __slots__ = ("_drafts", "_unseen", "trust")

    def __init__(self, unseen: Sequence[int] = ()) -> None:
        self._unseen = unseen
        self._drafts: Sequence[int] = ()
        self.trust = TRUST_AT_FIRST

    def extend(self, tokens: Sequence[int]) -> None:
        if len(self._drafts) and len(tokens):
            self.trust += LATEST * ((self._drafts[0] == tokens[0]) - self.trust)
        self._drafts = ()

    def offer(self, drafts: Sequence[int]) -> None:
        self._drafts = drafts

    def propose(self, count: int, launched: Sequence[int] | None = None) -> Sequence[int]:
        count = min(count, worthwhile(self.trust))
        return self._drafts[:count] if launched is None else self._unseen[:count]
