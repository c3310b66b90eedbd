"""Prompt lookup: drafts are the tokens that followed the latest earlier occurrence of the last few tokens.

The tokens are kept as a text of one character each, so that a look-up is a search in a text, without an index: of
some thousands of tokens in microseconds. Longer n-grams take precedence: what follows sixteen equal tokens is
mostly equal, too. A draft that reaches the end of the sequence continues with its own tokens, so a short period is
repeated as often as needed.

Drafting is cheap, verifying is not. Therefore as many drafts are proposed as are worth their price by how many
were right lately, and none for text without repetitions. A sequence that proposes nothing *rests*, each time twice
as long as before, and costs nothing. Its guess for the tokens of a rest counts, too, so that a text that begins to
repeat itself is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.gpu_worker.speculation.proposer import (
    LATEST,
    TRUST_AT_FIRST,
    Launched,
    Price,
    agreeing,
    behind,
    held,
    trusted,
    worthwhile,
)

GUESSED = LATEST / 4
"""The weight of a guess in `trust`: it was made where nothing was proposed."""

PRACTISED, AT_ONCE = 256, 8
"""The last tokens of a prompt are guessed, some at once, so that a sequence begins with some experience."""

SEARCHED, LONGEST_REST = 8192, 64
"""A look takes longer in a longer text. So for each `SEARCHED` tokens of its text a sequence rests as long again,
at most `LONGEST_REST` tokens."""

CHARACTERS = 2**20 - 1
"""Tokens above this are looked up as others. Their drafts are wrong."""

SURE = 0.9
"""The probability from which drafts are made behind tokens that are only guessed. Otherwise the sequence waits
until these are known."""


_SURE = Price(SURE, 0.0)


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Looks up the last `longest` tokens first, then half as many each time, and never fewer than
    `shortest`."""

    shortest: int = 2
    longest: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"n-grams from {self.shortest} to {self.longest}")

    def drafter(self, tokens: Sequence[int]) -> NgramDrafter:
        drafter = NgramDrafter(self.shortest, self.longest)
        begin = max(0, len(tokens) - PRACTISED)
        drafter.extend(tokens[:begin])
        for at in range(begin, len(tokens), AT_ONCE):
            drafter.guessed = drafter.guess(AT_ONCE)
            drafter.extend(tokens[at : at + AT_ONCE])
        return drafter


class NgramDrafter:
    """The tokens of one sequence. trust: the recent hit rate of drafts and guesses, 0 to 1. guessed: those of its
    rest."""

    __slots__ = ("_longest", "_rest", "_shortest", "_tokens", "guessed", "trust")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens = ""
        self._rest = 0
        self.guessed: Sequence[int] = ()
        self.trust = TRUST_AT_FIRST

    def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
        if n_drafts:
            self.trust = trusted(self.trust, n_drafts, n_held)
        else:
            n = min(len(self.guessed), len(tokens))
            self.trust = trusted(self.trust, n, agreeing(self.guessed, tokens), GUESSED)
        self._tokens += "".join([chr(token & CHARACTERS) for token in tokens])
        self.guessed = ()

    def rests(self, price: Price, *, in_flight: bool) -> int:
        most = min(LONGEST_REST, price.rest * (1 + len(self._tokens) // SEARCHED))
        rest = min(most, 2 * self._rest + 1)
        guess = self.guess(rest)
        proposes = guess and self.worth(price, in_flight=in_flight)
        self._rest, self.guessed = (0, ()) if proposes else (rest, guess)
        return self._rest

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
        tokens, end = self._tokens, len(self._tokens)
        n = self._longest
        while n >= self._shortest:
            if n < end and (at := tokens.rfind(tokens[end - n :], 0, end - 1)) >= 0:
                found = tokens[at + n : at + n + count]  # fewer than `count`: all of a period
                return [*map(ord, found * -(-count // len(found)))][:count] if count else []
            n //= 2
        return []
