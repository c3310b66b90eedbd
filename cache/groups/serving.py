"""From which positions can a group of layers serve?

A match by tokens says how far the cache knows a prompt. To go on from a position p, each group of layers must have
what it reads at p:

    layers that see everything    all positions before p: everywhere in the match
    layers with a window W        positions p - W + 1 to p - 1, so serving p does not imply serving p - 1
    layers with a state           a snapshot at p

So a match ends at the deepest position, at most the match by tokens, at which every group can serve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from petiole.cache.groups.companions import CompanionPool
from petiole.cache.pages.page_pool import Int32s, Pages

Served = NDArray[np.bool_]


class LayerGroup(Protocol):
    """Layers that keep something else than everything. pool: of what they keep. hit_tokens, missed_tokens: how
    many positions look-ups found that this group could serve, and how many others."""

    pool: CompanionPool
    hit_tokens: int
    missed_tokens: int

    def reset(self) -> None:
        """Forget everything: no row has pages, and nothing is cached."""

    def serves(self, pages: Pages) -> Served:
        """bool [len(pages) + 1]: whether the group can go on after the first i pages of a cached prefix. Always
        True for 0."""

    def begin(self, row: int, pages: Pages) -> None:
        """Let a row go on after cached pages."""

    def slide(self, matrix: Int32s, rows: Pages, starts: NDArray[np.integer]) -> None:
        """Give back what no step of these rows reads that begins at `starts` or beyond."""

    def keep(self, row: int, ends: ArrayLike) -> None:
        """Note positions from which other sequences may go on."""

    def remap(self, row: int, start: int, old: Pages, new: Pages) -> None:
        """The row's pages from column `start` on become others of equal content."""

    def cut(self, row: int, n_pages: int) -> None:
        """The row has lost its pages from column `n_pages` on."""

    def end(self, matrix: Int32s, row: int) -> None:
        """Give back everything that the row holds."""

    def keep_only(self, matrix: Int32s, held: Collection[int]) -> None:
        """After a fault in the middle of a change: forget all but what these rows hold."""

    def check(self, matrix: Int32s, row_pages: NDArray[np.int64], n_pages: int) -> None:
        """Check the books of the group. Raises ConservationError."""


def deepest(served: Iterable[Served], n_pages: int) -> int:
    """The most leading pages, of `n_pages`, after which all groups can go on."""
    everywhere = np.ones(n_pages + 1, dtype=np.bool_)
    for one in served:
        everywhere &= one[: n_pages + 1]
    return int(np.flatnonzero(everywhere)[-1])
