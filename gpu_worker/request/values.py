"""Values: numbers beside tokens, which a model makes together with a token and embeds in its place.

    token   text  text   a    text   b         a, b: tokens of two kinds of values
    numbers  ()    ()   (7,)   ()  (8, 9)

A model with values declares their *kinds*. A token of a kind carries as many whole numbers as the kind has; any
other token carries none. Only numbers travel from the device and stand in deltas, logs and cache tokens; what they
stand for, its kind tells (`shown`). In the arrays of a step the numbers beside one token are a *line*, with
columns for each kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from petiole.cache import CacheToken, ValueToken

NO_NUMBER = -1
"""Stands for a missing number in a line of inputs. A token of a kind without its numbers is text."""

Numbers = tuple[int, ...]
"""The numbers that one token carries: as many as its kind has, or none."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of values.

    name: how the decoder knows it. token_id: the token that carries such a value. n: how many numbers it has, each
    below `limit`. shown: what the numbers stand for. cached: the token's identity in the prefix cache, of type
    `cached_as`; a prompt may have such tokens, too."""

    name: str
    token_id: int
    n: int
    limit: int
    shown: Callable[[Numbers], tuple[float, ...]]
    cached: Callable[[Numbers], ValueToken]
    cached_as: type


class ValueKinds:
    """The kinds of values that a model has. Immutable."""

    def __init__(self, kinds: Iterable[ValueKind]) -> None:
        self.kinds = tuple(kinds)
        self._by_token = {kind.token_id: kind for kind in self.kinds}
        self._by_type = {kind.cached_as: kind for kind in self.kinds}
        ends = itertools.accumulate(kind.n for kind in self.kinds)
        self._columns = {
            kind.token_id: slice(end - kind.n, end) for kind, end in zip(self.kinds, ends, strict=True)
        }

    @property
    def width(self) -> int:
        """How many numbers a line has."""
        return sum(kind.n for kind in self.kinds)

    def columns(self, kind: ValueKind) -> slice:
        """Where the numbers of a kind stand in a line."""
        return self._columns[kind.token_id]

    def kind(self, token_id: int) -> ValueKind | None:
        return self._by_token.get(token_id)

    def kind_of(self, token: ValueToken) -> ValueKind | None:
        """The kind of a typed token of a prompt."""
        return self._by_type.get(type(token))

    def numbers(self, token_id: int, line: Sequence[int]) -> Numbers:
        """The numbers that belong to a token, of its line."""
        kind = self._by_token.get(token_id)
        return () if kind is None else tuple(line[self.columns(kind)])

    def write(self, token_id: int, numbers: Numbers, line: MutableSequence[int] | npt.NDArray[np.int32]) -> None:
        """Write the numbers of a token into a line, unless the token is text."""
        kind = self._by_token.get(token_id)
        if kind is not None and numbers:
            line[self.columns(kind)] = numbers

    def shown(self, token_id: int, numbers: Numbers) -> tuple[float, ...]:
        kind = self._by_token.get(token_id)
        return () if kind is None else kind.shown(numbers)

    def cache_token(self, token_id: int, numbers: Numbers) -> CacheToken | int:
        """The identity of the token in the prefix cache."""
        kind = self._by_token.get(token_id)
        return token_id if kind is None else kind.cached(numbers)
