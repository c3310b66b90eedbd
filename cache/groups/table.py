"""The page table of a model with groups of layers that keep less than everything.

The table's own pages are those of the layers that see everything. Each other group has a pool, of pages or of
snapshots, which accompany the table's pages (`companions`). So rows and the prefix cache own the table's pages
as ever, and what a group holds follows from what its rows hold. A model without layers that see everything has a
table too, with pages that take no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from petiole.cache.exceptions import ConservationError
from petiole.cache.groups.recurrent_states import StateGroup
from petiole.cache.groups.serving import LayerGroup
from petiole.cache.groups.windows import WindowGroup
from petiole.cache.pages.page_pool import CACHED, FREE, Pages
from petiole.cache.pages.page_table import PageTable


class WindowPages(NamedTuple):
    """The pool of a group with a window: its number of pages, with the reserved page 0."""

    window: int
    n_pages: int


class GroupedTable(PageTable):
    """A `PageTable` beside which groups of layers have pools of their own. windows: those with a window. states:
    the layers with a state, if there are any. snapshots: the size of their pool, with the reserved one;
    keeps_states: whether any are made.

    `reserve` takes pages of the table alone. `reserve_many` takes those of all groups that a step will write."""

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        max_batch_size: int,
        max_pages_per_row: int | None = None,
        *,
        windows: Sequence[WindowPages],
        longest_step: int,
        snapshots: int = 0,
        keeps_states: bool = True,
    ) -> None:
        super().__init__(n_pages, page_size, max_batch_size, max_pages_per_row)
        self.windows = tuple(
            WindowGroup(
                window,
                size,
                page_size=page_size,
                n_pages=n_pages,
                n_rows=max_batch_size,
                longest_step=longest_step,
            )
            for window, size in windows
        )
        self.states = (
            StateGroup(snapshots, page_size=page_size, n_pages=n_pages, n_rows=max_batch_size, keeps=keeps_states)
            if snapshots
            else None
        )
        self.groups: tuple[LayerGroup, ...] = self.windows if self.states is None else (*self.windows, self.states)

    def reset(self, held: Collection[int]) -> None:
        super().reset(held)
        for group in self.groups:
            group.reset()

    def companions(self, pages: NDArray[np.integer]) -> tuple[NDArray[np.int32], ...]:
        """The pages of each group with a window that accompany these; 0: none."""
        return tuple(group.pool.of[pages] for group in self.windows)

    # ------------------------------------------------------------ rows

    def map_pages(self, batch_idx: int, logical_start: int, physical_pages: ArrayLike) -> None:
        """See `PageTable`. What the groups' next positions read must be there."""
        super().map_pages(batch_idx, logical_start, physical_pages)
        pages = self.get_pages(batch_idx, 0, self.page_count(batch_idx))
        for group in self.groups:
            group.begin(batch_idx, pages)

    def reserve_many(self, rows: NDArray[np.integer], kv_lengths: NDArray[np.integer]) -> int:
        held: Pages = rows.astype(np.int64)
        wanted, n = -(-kv_lengths // self.page_size), len(held)
        for group in self.windows:
            n = group.fitting(held[:n], wanted[:n])
        n = super().reserve_many(held[:n], kv_lengths[:n])
        for group in self.windows:
            group.cover(self.matrix, held[:n], wanted[:n])
        return n

    def slide(self, rows: NDArray[np.integer], starts: NDArray[np.integer]) -> None:
        """Give back what no step of these rows reads that begins at `starts` or beyond. Steps in flight may still
        read it: see `remap`."""
        held: Pages = rows.astype(np.int64)
        for group in self.groups:
            group.slide(self.matrix, held, starts)

    def keep(self, batch_idx: int, ends: ArrayLike) -> None:
        """Note positions of a row from which other sequences may go on."""
        for group in self.groups:
            group.keep(batch_idx, ends)

    def truncate(self, batch_idx: int, kv_length: int) -> int:
        freed = super().truncate(batch_idx, kv_length)
        for group in self.groups:
            group.cut(batch_idx, self.page_count(batch_idx))
        return freed

    def remap(self, batch_idx: int, start: int, pages: Pages) -> int:
        old = self.get_pages(batch_idx, start, start + len(pages))
        for group in self.groups:
            group.remap(batch_idx, start, old, pages)
        return super().remap(batch_idx, start, pages)

    def erase(self, batch_idx: int) -> None:
        """See `PageTable`. Other sequences may go on from the end of what the row has published."""
        pages = self.get_pages(batch_idx, 0, self.page_count(batch_idx))
        published = np.flatnonzero(self._owner[pages] == CACHED)
        for group in self.groups:
            if len(published):
                group.keep(batch_idx, [(int(published[-1]) + 1) * self.page_size])
            group.end(self.matrix, batch_idx)
        super().erase(batch_idx)

    def release_pages(self, pages: Pages) -> None:
        for group in self.groups:
            group.pool.detach(pages)
        super().release_pages(pages)

    # ------------------------------------------------------------ conservation

    def keep_only(self, held: Collection[int], cached: Pages) -> None:
        super().keep_only(held, cached)
        for group in self.groups:
            group.keep_only(self.matrix, held)

    def check(self) -> None:
        super().check()
        for group in self.groups:
            group.check(self.matrix, self._row_pages, self.n_pages)
            if (self._owner[group.pool.of > 0] == FREE).any():
                raise ConservationError("a page of nobody has a companion")
