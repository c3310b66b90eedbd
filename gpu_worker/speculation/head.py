"""Drafts that the runtime makes: a head of the model drafts behind the sampling of each step.

How many it makes behind a step is decided when that step is planned, by how often its drafts were right: as many
as will be worth their price. Those behind a step in flight stay where they are made, and the next step reads them
there. The drafts of a sequence that is worth none are tried again now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.gpu_worker.speculation.proposer import (
    TRUST_AT_FIRST,
    Launched,
    Price,
    agreeing,
    held,
    trusted,
    worthwhile,
)

TRIED = 16
"""A sequence that is worth no draft has one made for each so many of its tokens."""


@dataclass(frozen=True, slots=True)
class HeadProposer:
    """unseen: what stands in a step for each draft that only the runtime knows."""

    unseen: Sequence[int] = ()

    def drafter(self, tokens: Sequence[int]) -> HeadDrafter:
        return HeadDrafter(self.unseen)


class HeadDrafter:
    """The drafts after the last committed token of one sequence. `trust`: as in `ngram`, of drafts behind right
    ones."""

    __slots__ = ("_drafts", "_n_tokens", "_unseen", "trust")

    def __init__(self, unseen: Sequence[int] = ()) -> None:
        self._unseen = unseen
        self._drafts: Sequence[int] = ()
        self._n_tokens = 0
        self.trust = TRUST_AT_FIRST

    def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
        self._n_tokens += len(tokens)
        n = min(len(self._drafts), len(tokens))
        self.trust = trusted(self.trust, n, agreeing(self._drafts, tokens))
        self._drafts = ()

    def rests(self, price: Price, *, in_flight: bool) -> int:
        return 0

    def offer(self, drafts: Sequence[int]) -> None:
        self._drafts = drafts

    def propose(self, count: int, launched: Launched | None = None) -> Sequence[int]:
        return self._drafts[:count] if launched is None else self._unseen[: min(count, launched.made)]

    def worth(self, price: Price, *, in_flight: bool) -> int:
        return worthwhile(self.trust, price.draft)

    def expects(self, n: int) -> float:
        return held(self.trust, n)

    def wanted(self, count: int, price: Price, *, waits: bool) -> int:
        is_tried = price.draft < 1 and self._n_tokens % TRIED == 0
        worth = min(count, self.worth(price, in_flight=False))
        pays = not waits or price.pays(self.expects(worth), worth)
        return max(worth if pays else 0, is_tried)
