"""Drafts that the runtime makes: a head of the model drafts behind the sampling of each step.

The runtime drafts in every step, so its drafts after the last committed token are always known. What is left to do
here is to count how often they were right: a sequence whose drafts are wrong must not wait to be verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.gpu_worker.speculation.proposer import LATEST, TRUST_AT_FIRST, worthwhile


@dataclass(frozen=True, slots=True)
class HeadProposer:
    def drafter(self, tokens: Sequence[int]) -> HeadDrafter:
        return HeadDrafter()


class HeadDrafter:
    """The drafts after the last committed token of one sequence. `trust`: as in `ngram`."""

    __slots__ = ("_drafts", "trust")

    def __init__(self) -> None:
        self._drafts: Sequence[int] = ()
        self.trust = TRUST_AT_FIRST

    def extend(self, tokens: Sequence[int]) -> None:
        if len(self._drafts) and len(tokens):
            self.trust += LATEST * ((self._drafts[0] == tokens[0]) - self.trust)
        self._drafts = ()

    def offer(self, drafts: Sequence[int]) -> None:
        self._drafts = drafts

    def propose(self, count: int) -> Sequence[int]:
        return self._drafts[: min(count, worthwhile(self.trust))]
