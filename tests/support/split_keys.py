"""How FlashInfer attends where it splits the keys of a row among blocks, in numpy (0.7.2: `scheduler.cuh`,
`prefill.cuh` for tensor cores, `decode.cuh` without these).

    plan    the host gives each query of a row a place for each chunk of the length that it knows, and each chunk
            a block
    card    a block reads the length on the card. What it makes of query q and chunk c goes to the row's place
            q * (chunks of the length on the card) + c
    merge   joins the places that the plan has given each query

              planned: 3 chunks            on the card: 2 chunks
    places    q0 q0 q0 q1 q1 q1            q0 q0 q1 q1 .  .          the merge takes parts of q1 for q0

So a step that is planned for the most positions of a row, whose true number only the card knows, is right where
the keys are not split, or where both numbers have as many chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CHUNK = 128
"""FlashInfer's smallest number of keys of a block, for pages of up to as many."""


def chunks(length: int, chunk: int) -> int:
    return -(-length // chunk)


def agree(planned: int, length: int, queries: int, *, tensor_cores: bool = True, chunk: int = CHUNK) -> bool:
    """Whether a row comes out right that is planned for one number of keys and has another one, not larger."""
    if tensor_cores:
        return queries == 1 or chunks(planned, chunk) == chunks(length, chunk)
    return chunk * (chunks(planned, chunk) - 1) <= length


@dataclass(frozen=True)
class Row:
    """q: [queries, width]; they ask from the last positions. k, v: [at least planned, width]: behind `length` lies
    what other rows have. planned: what the host plans for; length: what the card reads."""

    q: Floats
    k: Floats
    v: Floats
    planned: int
    length: int

    def attended(self, first: int, end: int) -> tuple[Floats, Floats]:
        """What the queries find among the keys [first, end): values [queries, width], and the logarithms of the
        sums of their weights. The last position that a query sees follows from the length on the card."""
        seen = np.arange(self.length - len(self.q), self.length)[:, None]
        scores = self.q @ self.k[first:end].T
        scores[np.arange(first, end) > seen] = -np.inf
        with np.errstate(divide="ignore"):
            sums = np.log(np.exp(scores).sum(1))
        weights = np.exp(scores - np.where(np.isneginf(sums), 0.0, sums)[:, None])
        return weights @ self.v[first:end], sums

    def whole(self) -> Floats:
        """Without a split."""
        return self.attended(0, self.length)[0]

    def merged(self, chunk: int = CHUNK, *, tensor_cores: bool = True) -> Floats:
        """With one. Places that no block has filled are not a number."""
        n, planned = len(self.q), chunks(self.planned, chunk)
        stride = chunks(self.length, chunk) if tensor_cores else planned
        values, sums = np.full((n * planned, self.v.shape[1]), np.nan), np.full(n * planned, np.nan)
        for c in range(planned):
            first = chunk * c
            end = min(first + chunk, self.length)
            if tensor_cores:
                first = min(first, self.length)
            elif first > self.length:  # the difference of two numbers without a sign is a large one
                end = first + chunk
            at = np.arange(n) * stride + c
            values[at], sums[at] = self._part(first, end, tensor_cores=tensor_cores)
        parts = sums.reshape(n, planned)
        with np.errstate(invalid="ignore"):
            weights = np.exp(parts - parts.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        joined: Floats = (weights[..., None] * values.reshape(n, planned, -1)).sum(1)
        return joined

    def _part(self, first: int, end: int, *, tensor_cores: bool) -> tuple[Floats, Floats]:
        """The kernel without tensor cores has one query, which sees all keys of its chunk."""
        if tensor_cores or end <= self.length:
            return self.attended(first, end)
        scores = self.q @ self.k[first:end].T
        sums = np.log(np.exp(scores).sum(1))
        return np.exp(scores - sums[:, None]) @ self.v[first:end], sums
