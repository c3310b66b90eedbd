"""A page table without pages: rows of sequences that a step computes whole, and whose keys nobody keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from petiole.cache.pages.page_table import PageTable

_ANY = 2**31 - 1
"""Positions: more than any sequence has."""


class RowTable(PageTable):
    """`max_batch_size` rows, each of which holds any number of positions. Row 0 is reserved."""

    least_pages = 1  # the reserved one

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(1, _ANY, max_batch_size, 1)

    def pages_for(self, kv_length: int) -> int:
        return 0

    def capacity(self, batch_idx: int) -> int:
        return _ANY

    def reserve_many(self, rows: NDArray[np.integer], kv_lengths: NDArray[np.integer]) -> int:
        self._require_held(rows)
        return len(rows)
