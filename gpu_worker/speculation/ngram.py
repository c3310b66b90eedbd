"""Prompt lookup: what followed the last few tokens when they last occurred is a good guess at what follows now.

An index from each n-gram to the position behind its latest occurrence makes a proposal a few dictionary look-ups,
however long the sequence is. Longer n-grams are trusted first. A guess that runs into the end of the sequence goes
on reading its own output, so that a short period is proposed as often as it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """The index of one sequence."""

    __slots__ = ("_behind", "_longest", "_shortest", "_tokens")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        own, behind = self._tokens, self._behind
        for token in tokens:
            end = len(own)
            for n in range(self._shortest, min(self._longest, end) + 1):
                behind[tuple(own[end - n :])] = end
            own.append(int(token))

    def propose(self, count: int) -> list[int]:
        tokens = self._tokens
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            start = self._behind.get(tuple(tokens[-n:]))
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(count)]
        return []
