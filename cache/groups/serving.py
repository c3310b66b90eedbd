"""From which positions can a group of layers serve?

A match by tokens says how far the cache knows a prompt. To go on from a position p, each group of layers must have
what it reads at p:

    layers that see everything    all positions before p: everywhere in the match
    layers with a window W        positions p - W + 1 to p - 1, so serving p does not imply serving p - 1
    layers with a state           a checkpoint at p

So a match ends at the deepest position, at most the match by tokens, at which every group can serve.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from petiole.cache.pages.pool import Pages

Served = NDArray[np.bool_]


class LayerGroup(Protocol):
    """Layers that keep something else than everything."""

    def serves(self, pages: Pages) -> Served:
        """bool [len(pages) + 1]: whether the group can go on behind the first i pages of a cached prefix. Always
        True for 0."""


def deepest(served: Iterable[Served], n_pages: int) -> int:
    """The most leading pages, of `n_pages`, behind which all groups can go on."""
    everywhere = np.ones(n_pages + 1, dtype=np.bool_)
    for one in served:
        everywhere &= one[: n_pages + 1]
    return int(np.flatnonzero(everywhere)[-1])
