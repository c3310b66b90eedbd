"""Tokens that stand for decoded values: coordinates and sizes.

A model with such tokens decodes *bins* (whole numbers) beside every token id, in the step that samples it. A
coordinate token has one bin, a size token two (width, height), any other token none. Bins, not values, travel from
the device and stand in deltas, logs and cache tokens. A table gives the value of a bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.cache import CacheToken, CoordToken, SizeToken

N_BINS = 2
"""How many bins are decoded beside each token id. A coordinate token uses the first one, a text token none."""

NO_BIN = -1
"""Stands for a missing bin. A coordinate or size token of a prompt is text if it has no bins."""

Bins = tuple[int, ...]
"""The bins of one token: as many as its kind has."""


@dataclass(frozen=True, slots=True)
class ValueTokens:
    """The value tokens of a model. `coordinates` and `sizes` are the values of the bins, in order."""

    coordinate_id: int
    size_id: int
    coordinates: tuple[float, ...]
    sizes: tuple[float, ...]

    def n_bins(self, token_id: int) -> int:
        return 1 if token_id == self.coordinate_id else 2 if token_id == self.size_id else 0

    def limit(self, token_id: int) -> int:
        """The number of distinct bins of a token."""
        return len(self.coordinates if token_id == self.coordinate_id else self.sizes)

    def bins(self, token_id: int, decoded: Sequence[int]) -> Bins:
        """The bins that belong to a token, of those decoded beside it."""
        return tuple(decoded[: self.n_bins(token_id)])

    def values(self, token_id: int, bins: Bins) -> tuple[float, ...]:
        table = self.coordinates if token_id == self.coordinate_id else self.sizes
        return tuple(table[one] for one in bins)

    def cache_token(self, token_id: int, bins: Bins) -> CacheToken | int:
        """The identity of the token in the prefix cache."""
        if token_id == self.coordinate_id:
            return CoordToken(self.coordinates[bins[0]], bins[0])
        if token_id == self.size_id:
            return SizeToken(self.sizes[bins[0]], self.sizes[bins[1]], *bins)
        return token_id
