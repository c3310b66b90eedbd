"""The interface of draft sources, and the acceptance statistics.

An engine has one `Proposer`, each sequence one `Drafter`. The scheduler passes every committed token to the
drafter and requests drafts when it plans a step of the sequence: `extend` feeds it, `propose` returns the drafts
that are ready. A drafter that `rests` gets its tokens later, and is asked for nothing until then. A runtime that
drafts itself (`ModelLimits.drafts`) sends as many with each step as were `wanted`, and `offer` passes them on.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

_LOG_EVERY = 1000

TRUST_AT_FIRST = 0.5
LATEST = 1 / 8
"""The weight of the latest draft in a drafter's `trust`, a moving average of how many of its drafts were right."""

MOST_TRUST = 0.9999
"""A higher trust counts as this."""


def worthwhile(trust: float, price: float) -> int:
    """The number of drafts that are worth their price: the first n are all right with the probability trust**n,
    which is above it."""
    return 0 if trust <= price else int(math.log(price) / math.log(min(trust, MOST_TRUST)))


def agreeing(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the first drafts are the tokens in their places."""
    n = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        n += 1
    return n


def trusted(trust: float, n: int, n_held: int, weight: float = LATEST) -> float:
    """The trust after n drafts, of which the first n_held were right. Those behind a wrong one do not count."""
    for i in range(min(n, n_held + 1)):
        trust += weight * ((i < n_held) - trust)
    return trust


def held(trust: float, n: int) -> float:
    """How many of n drafts are expected to be right, each with all before it."""
    return sum([trust**i for i in range(1, n + 1)])


class Price(NamedTuple):
    """In tokens. draft: of each draft of a sequence; wait: of waiting until its steps in flight are known. rest:
    after how many a sequence without drafts may look for some again, so that looks cost little."""

    draft: float
    wait: float
    rest: int = 1

    def pays(self, expected: float, n: int) -> bool:
        """Whether it pays to wait for n drafts, of which so many are expected to hold."""
        return expected > n * self.draft + self.wait


class Launched(NamedTuple):
    """What is in flight of a sequence: the drafts that its newest step verifies, and how many the runtime makes
    behind that step."""

    drafts: Sequence[int] = ()
    made: int = 0


def behind(launched: Sequence[int], guess: Sequence[int], count: int) -> Sequence[int]:
    """At most `count` tokens of a guess that follow those that a step in flight is expected to yield. guess: of
    the next tokens; launched: the drafts that the step verifies, of which it accepts those that agree with the
    guess."""
    expected = 1 + agreeing(launched, guess)
    return guess[expected : expected + count]


class Drafter(Protocol):
    """The draft source of one sequence. An exception fails only that request."""

    def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
        """Append the tokens committed since the last call. n_drafts: how many drafts were verified for the last of
        them; n_held: how many of these held."""

    def rests(self, price: Price, *, in_flight: bool) -> int:
        """How many tokens are to be committed before the next call of any method, but those of a verification in
        flight are passed on at once. Called after `extend` and `offer`. See `worth`."""

    def worth(self, price: Price, *, in_flight: bool) -> int:
        """How many drafts would be worth this price: see `worthwhile`. With 0, nothing is proposed. in_flight: a
        step is in flight behind the last token, and if drafts must wait for it, that must pay."""

    def expects(self, n: int) -> float:
        """How many of n drafts are expected to be right."""

    def propose(self, count: int, launched: Launched | None = None) -> Sequence[int] | None:
        """At most `count` drafts; may be empty. Changes nothing: it may be called again before the next `extend`.

        launched None: drafts for the next tokens. Otherwise a step is in flight behind the last token: the
        proposal is for the tokens after those that this step is expected to yield, one at least. It may be wrong
        about them, and then its drafts are rejected. None: there will be drafts once these tokens are known."""

    def wanted(self, count: int, price: Price, *, waits: bool) -> int:
        """How many drafts, at most `count`, the runtime is to make behind the next step, if it drafts. waits: the
        sequence has to wait before they are verified."""

    def offer(self, drafts: Sequence[int]) -> None:
        """What the runtime drafted after all tokens that were committed."""


class Proposer(Protocol):
    def drafter(self, tokens: Sequence[int]) -> Drafter:
        """A drafter for a sequence that begins with `tokens`. Called on a preparation thread."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of drafted and accepted tokens, and of sequences' verifications. A verification yields one token more
    than it accepts drafts. by_accepted: how many verifications have accepted 0, 1, 2, ... drafts."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    by_accepted: list[int] = field(default_factory=lambda: [0])

    @property
    def accepted_at(self) -> list[int]:
        """How many verifications have accepted their first draft, their second, ..."""
        return list(itertools.accumulate(self.by_accepted[:0:-1]))[::-1]

    @property
    def mean_length(self) -> float:
        """Tokens that a verification yields, 0 before the first one."""
        return 1 + self.accepted / self.verifications if self.verifications else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one verified sequence. Logs every 1,000 drafts."""
        before = self.drafted // _LOG_EVERY
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        if accepted >= len(self.by_accepted):
            self.by_accepted.extend([0] * (1 + accepted - len(self.by_accepted)))
        self.by_accepted[accepted] += 1
        if self.drafted // _LOG_EVERY > before:
            logger.info(
                "speculation: %d drafts, %d accepted, rate %.2f%%, %.2f tokens a verification",
                self.drafted,
                self.accepted,
                100 * self.acceptance_rate,
                self.mean_length,
            )
