"""Prompt lookup: drafts are the tokens that followed the latest earlier occurrence of the last few tokens.

An index maps each n-gram to the position after its latest occurrence, so a draft takes a few dictionary look-ups,
regardless of the sequence's length. Longer n-grams take precedence. A draft that reaches the end of the sequence
continues with its own tokens, so a short period is repeated as often as needed.

Drafting is cheap, verifying is not. Therefore each new token, also of the prompt, is compared with the draft for
its place, even if that draft was not proposed. The recent hit rate decides how many drafts are proposed: as many
as are worth their price, and none for text without repetitions. Drafts that were proposed have a rate of their
own, and the lower one counts: in a list of numbers most digits are guessed right, but the first one that differs
is where drafts begin again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.gpu_worker.speculation.proposer import (
    LATEST,
    TRUST_AT_FIRST,
    Launched,
    Price,
    behind,
    held,
    worthwhile,
)

RECOVERED = 1 / 64
"""The weight of a draft that was not proposed in the rate of those that were."""

SURE = 0.9
"""The probability from which drafts are made behind tokens that are only guessed. Otherwise the sequence waits
until these are known."""


_SURE = Price(SURE, 0.0)


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Looks up the last `longest` tokens first, then fewer, down to `shortest`."""

    shortest: int = 2
    longest: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"n-grams from {self.shortest} to {self.longest}")

    def drafter(self, tokens: Sequence[int]) -> NgramDrafter:
        drafter = NgramDrafter(self.shortest, self.longest)
        drafter.extend([int(token) for token in tokens])
        return drafter


class NgramDrafter:
    """The n-gram index of one sequence."""

    __slots__ = ("_behind", "_longest", "_of_all", "_of_proposed", "_shortest", "_tokens")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._of_all = self._of_proposed = TRUST_AT_FIRST

    @property
    def trust(self) -> float:
        """The recent hit rate of drafts, 0 to 1: of all or of those proposed, whichever is lower."""
        return min(self._of_all, self._of_proposed)

    def extend(self, tokens: Sequence[int], n_drafts: int = 0) -> None:
        own, behind, longest = self._tokens, self._behind, self._longest
        skips = range(1 + longest - self._shortest)
        of_all, of_proposed = self._of_all, self._of_proposed
        end, last = len(own), tuple(own[-longest:])
        for token in tokens:
            start = 0
            for skipped in skips if end >= longest else range(max(0, 1 + end - self._shortest)):
                gram = last[skipped:]
                start = start or behind.get(gram, 0)
                behind[gram] = end
            if start:
                hit = own[start] == token
                of_all += LATEST * (hit - of_all)
                if not n_drafts:
                    of_proposed += RECOVERED * (hit - of_proposed)
            own.append(token)
            last, end = (*last, token)[-longest:], end + 1
        n_held = len(tokens) - 1
        for k in range(min(n_held + 1, n_drafts)):
            of_proposed += LATEST * ((k < n_held) - of_proposed)
        self._of_all, self._of_proposed = of_all, of_proposed

    def propose(self, count: int, launched: Launched | None = None) -> Sequence[int] | None:
        if launched is None:
            return self.guess(count)
        n: int = 1 + len(launched.drafts)
        drafts: Sequence[int] = ()
        if n <= self.worth(_SURE, in_flight=False):  # behind a wrong token all drafts are wrong
            drafts = behind(launched.drafts, self.guess(n + count), count)
        return drafts or (None if self.guess(1) else ())

    def worth(self, price: Price, *, in_flight: bool) -> int:
        trust = self.trust
        n = worthwhile(trust, price.draft)
        waits = n > 0 and in_flight and trust < SURE
        return 0 if waits and not price.pays(held(trust, n), n) else n

    def expects(self, n: int) -> float:
        return held(self.trust, n)

    def wanted(self, count: int, price: Price, *, waits: bool) -> int:
        return 0

    def offer(self, drafts: Sequence[int]) -> None:
        """Nothing: its drafts are its own."""

    def guess(self, count: int) -> list[int]:
        """Drafts for the next `count` tokens; none if the last tokens have not occurred before."""
        tokens = self._tokens
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            start = self._behind.get(tuple(tokens[-n:]))
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(count)]
        return []
