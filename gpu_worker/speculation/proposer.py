"""The interface of draft sources, and the acceptance statistics.

An engine has one `Proposer`, each sequence one `Drafter`. The scheduler passes every committed token to the
drafter and requests drafts when it plans a step of the sequence: `extend` feeds it, `propose` returns the
drafts that are ready. A runtime that drafts itself (`ModelLimits.drafts`) sends its drafts with each step, and
`offer` passes them on.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

_LOG_EVERY = 1000

TRUST_AT_FIRST = 0.6
LATEST = 1 / 8
"""The weight of the latest draft in a drafter's `trust`, a moving average of how many of its drafts were right."""


def worthwhile(trust: float, probability: float = 0.5, most: float = 0.99) -> int:
    """The number of drafts that are all accepted with at least this probability. most: a higher trust counts as
    this."""
    return 0 if trust < probability else int(math.log(probability) / math.log(min(trust, most)))


def behind(launched: Sequence[int], guess: Sequence[int], count: int) -> Sequence[int]:
    """At most `count` tokens of a guess that follow those that a step in flight is expected to yield. guess: of
    the next tokens; launched: the drafts that the step verifies, of which it accepts those that agree with the
    guess."""
    agreeing = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(launched, guess, strict=False))
    expected = 1 + sum(1 for _ in agreeing)
    return guess[expected : expected + count]


class Drafter(Protocol):
    """The draft source of one sequence. An exception fails only that request."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the tokens committed since the last call."""

    def propose(self, count: int, launched: Sequence[int] | None = None) -> Sequence[int]:
        """At most `count` drafts; may be empty. Changes nothing: it may be called again before the next `extend`.

        launched None: drafts for the next tokens. Otherwise a step is in flight behind the last token, with these
        drafts: the proposal is for the tokens after those that this step is expected to yield, one at least. It
        may be wrong about them, and then its drafts are rejected."""

    def offer(self, drafts: Sequence[int]) -> None:
        """What the runtime drafted after all tokens that were committed."""


class Proposer(Protocol):
    def drafter(self, tokens: Sequence[int]) -> Drafter:
        """A drafter for a sequence that begins with `tokens`. Called on a preparation thread."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of drafted and accepted tokens, and of sequences' verifications. A verification yields one token more
    than it accepts drafts."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one verified sequence. Logs every 1,000 drafts."""
        before = self.drafted // _LOG_EVERY
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        if self.drafted // _LOG_EVERY > before:
            logger.info(
                "speculation: %d drafts, %d accepted, rate %.2f%%",
                self.drafted,
                self.accepted,
                100 * self.acceptance_rate,
            )
