"""Prompt lookup: what followed the last few tokens when they last occurred is a good guess at what follows now.

An index from each n-gram to the position behind its latest occurrence makes a guess a few dictionary look-ups,
however long the sequence is. Longer n-grams are trusted first. A guess that runs into the end of the sequence goes
on reading its own output, so that a short period is guessed as often as it fits.

Guesses are free, verifying them is not. So each token that comes, of the prompt too, is compared with what would
have been guessed in its place, whether anybody asked or not; proposed is as much as is likely to hold going by
that, and nothing at all where text does not repeat itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TRUST_AT_FIRST = 0.6
LATEST = 1 / 8
"""The weight of the latest guess in the trust."""


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Looks up the last `longest` tokens, then fewer, down to `shortest`."""

    shortest: int = 2
    longest: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"n-grams from {self.shortest} to {self.longest}")

    def drafter(self, tokens: Sequence[int]) -> NgramDrafter:
        drafter = NgramDrafter(self.shortest, self.longest)
        drafter.extend(tokens)
        return drafter


class NgramDrafter:
    """The index of one sequence. `trust`: the share of the latest guesses that held, 0 to 1."""

    __slots__ = ("_behind", "_longest", "_shortest", "_tokens", "trust")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.trust = TRUST_AT_FIRST

    def extend(self, tokens: Sequence[int]) -> None:
        own, behind = self._tokens, self._behind
        for token in tokens:
            end, start = len(own), 0
            for n in range(min(self._longest, end), self._shortest - 1, -1):
                gram = tuple(own[end - n :])
                start = start or behind.get(gram, 0)
                behind[gram] = end
            if start:
                self.trust += LATEST * ((own[start] == token) - self.trust)
            own.append(int(token))

    def propose(self, count: int) -> list[int]:
        return self.guess(min(count, self.worthwhile))

    @property
    def worthwhile(self) -> int:
        """As many guesses as are more likely to hold together than not."""
        return 0 if self.trust < 0.5 else int(math.log(0.5) / math.log(min(self.trust, 0.99)))

    def guess(self, count: int) -> list[int]:
        """The next `count` tokens; none when the last few are new."""
        tokens = self._tokens
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            start = self._behind.get(tuple(tokens[-n:]))
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(count)]
        return []
