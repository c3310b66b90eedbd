"""Drafts that the runtime makes: a head of the model drafts behind the sampling of each step.

How many it makes behind a step is decided when that step is planned, by how often its drafts were right: as many
as will be worth their price. Those behind a step in flight stay where they are made, and the next step reads them
there.

    worth their price    drafts, drafts, drafts, ...
    worth nothing        rest, one draft | rest twice as long, one draft | ...

A sequence whose drafts are worth nothing *rests*, and has one draft made behind each rest. Nothing verifies this
one: the next token shows whether it was right. Then the next rest is half as long, and twice as long if it was
wrong. So a sequence of which nothing holds soon costs what one without drafts costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from petiole.gpu_worker.speculation.proposer import (
    LATEST,
    TRUST_AT_FIRST,
    Launched,
    Price,
    agreeing,
    held,
    trusted,
    worthwhile,
)

SHORTEST_REST, LONGEST_REST = 8, 128
"""In tokens."""

OUTCOME = 4
"""So many tokens behind a rest its draft is known to be right or wrong, while two steps are in flight."""

FIRST = 8
"""So many outcomes of each sequence count for those that come after it."""


class Experience:
    """How often the first drafts of the last sequences were right. A new sequence begins with this `trust`."""

    __slots__ = ("trust",)

    def __init__(self) -> None:
        self.trust = TRUST_AT_FIRST

    def learn(self, n: int, n_held: int) -> None:
        self.trust = trusted(self.trust, n, n_held, LATEST / 4)


@dataclass(frozen=True, slots=True)
class HeadProposer:
    """unseen: what stands in a step for each draft that only the runtime knows."""

    unseen: Sequence[int] = ()
    experience: Experience = field(default_factory=Experience)

    def drafter(self, tokens: Sequence[int]) -> HeadDrafter:
        return HeadDrafter(self.unseen, self.experience)


class HeadDrafter:
    """The drafts after the last committed token of one sequence. trust: as in `ngram`, of drafts behind right
    ones. `_pays`: whether the drafts that were asked for last were worth their price."""

    __slots__ = (
        "_drafts",
        "_experience",
        "_n_outcomes",
        "_n_tokens",
        "_pays",
        "_rest",
        "_rests_until",
        "_unseen",
        "trust",
    )

    def __init__(self, unseen: Sequence[int] = (), experience: Experience | None = None) -> None:
        self._unseen, self._experience = unseen, experience or Experience()
        self.trust = self._experience.trust
        self._drafts: Sequence[int] = ()
        self._n_tokens = self._n_outcomes = self._rest = self._rests_until = 0
        self._pays = False

    def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
        self._n_tokens += len(tokens)
        if self._drafts:
            self._learn(min(len(self._drafts), len(tokens)), agreeing(self._drafts, tokens))
            self._drafts = ()

    def _learn(self, n: int, n_right: int) -> None:
        self.trust = trusted(self.trust, n, n_right)
        self._rest = self._rest // 2 if n_right else 2 * self._rest
        if self._n_outcomes < FIRST:
            self._experience.learn(n, n_right)
            self._n_outcomes += 1

    def rests(self, price: Price, *, in_flight: bool) -> int:
        behind = self._n_tokens - self._rests_until
        if behind >= OUTCOME and not (self._pays or self._drafts):
            self._rest = min(LONGEST_REST, max(SHORTEST_REST, self._rest))
            self._rests_until, behind = self._n_tokens + self._rest, -self._rest
        return max(0, -behind)

    def offer(self, drafts: Sequence[int]) -> None:
        self._drafts = drafts

    def propose(self, count: int, launched: Launched | None = None) -> Sequence[int]:
        return self._drafts[:count] if launched is None else self._unseen[: min(count, launched.made)]

    def worth(self, price: Price, *, in_flight: bool) -> int:
        return worthwhile(self.trust, price.draft)

    def expects(self, n: int) -> float:
        return held(self.trust, n)

    def wanted(self, count: int, price: Price, *, waits: bool) -> int:
        worth = min(count, self.worth(price, in_flight=False))
        self._pays = worth > 0 and (not waits or price.pays(self.expects(worth), worth))
        if self._pays:
            self._rest = 0
            return worth
        return int(price.draft < 1 and self._rest > 0 and self._n_tokens == self._rests_until)
