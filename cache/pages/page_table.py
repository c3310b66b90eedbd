"""The page table: maps the KV positions of each row to pages of a pool.

`PagePool` records the owner of every page, so erasing a row frees exactly the pages that the row owns. The table
needs no count of leading cached pages, and the cache may own pages in the middle of a row.

The table is one int32 matrix [max_batch_size, max_pages_per_row]. A row grows and shrinks at its end, so a step
that appends to it knows which entries the device's copy lacks. Entries below the end change only by `remap`, which
records them for the row's next step. Row 0 and page 0 pad batches and are never allocated.

Not thread-safe: one thread owns a page table and its cache.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike, NDArray

from petiole.cache.exceptions import (
    ConservationError,
    MappingError,
    MisalignedError,
    OutOfRowsError,
    OwnershipError,
    RowError,
)
from petiole.cache.pages.page_pool import CACHED, FREE, RESERVED, UNBOUND, Int32s, PagePool, Pages

Ints = NDArray[np.int64]


def ragged_arange(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> Ints:
    """The ranges `starts[i] .. starts[i] + lengths[i]`, concatenated: int64 [sum(lengths)]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    flat: Ints = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return flat


class PageTable(PagePool):
    """`max_batch_size` rows over `n_pages` pages of `page_size` positions. Row 0 and page 0 are reserved."""

    def __init__(
        self, n_pages: int, page_size: int = 1, max_batch_size: int = 64, max_pages_per_row: int | None = None
    ) -> None:
        super().__init__(n_pages, page_size, max_batch_size)
        width = n_pages - 1 if max_pages_per_row is None else max_pages_per_row
        for field, value, lowest in (("max_batch_size", max_batch_size, 2), ("max_pages_per_row", width, 1)):
            if value < lowest:
                raise MisalignedError(f"{field} must be at least {lowest}, got {value}")
        self.max_batch_size = max_batch_size
        self.max_pages_per_row = width
        self._matrix: Int32s = np.zeros((max_batch_size, width), dtype=np.int32)
        self._clear_rows(())

    def _clear_rows(self, held: Collection[int]) -> None:
        self._row_pages: Ints = np.zeros(self.max_batch_size, dtype=np.int64)
        self._row_held = np.isin(np.arange(self.max_batch_size), list(held))
        self._free_rows = [row for row in range(self.max_batch_size - 1, 0, -1) if row not in held]
        self._remapped: dict[int, int] = {}  # row -> first page that was remapped since `on_sent`

    def reset(self, held: Collection[int]) -> None:
        """Free all pages, those of the cache among them. These rows stay held, and have no pages."""
        self._free_all()
        self._clear_rows(held)

    @property
    def num_allocated(self) -> int:
        """Number of rows in use."""
        return self.max_batch_size - 1 - len(self._free_rows)

    @property
    def rows_available(self) -> int:
        return len(self._free_rows)

    @property
    def matrix(self) -> Int32s:
        """int32 [max_batch_size, max_pages_per_row]; entries beyond a row's mapped pages are stale."""
        return self._matrix

    @property
    def held_rows(self) -> list[int]:
        return np.flatnonzero(self._row_held).tolist()

    def page_count(self, batch_idx: int) -> int:
        """Number of pages mapped in a row."""
        return int(self._row_pages[batch_idx])

    def page_counts(self, rows: NDArray[np.integer]) -> Ints:
        """Number of pages mapped in each of the rows: int64 [len(rows)]."""
        counts: Ints = self._row_pages[rows]
        return counts

    def capacity(self, batch_idx: int) -> int:
        """Number of KV positions that the row's pages hold."""
        return int(self._row_pages[batch_idx]) * self.page_size

    # ------------------------------------------------------------ rows

    def allocate(self) -> int:
        """Allocate a row. Raises OutOfRowsError."""
        if not self._free_rows:
            raise OutOfRowsError(f"all {self.max_batch_size - 1} rows are held")
        row = self._free_rows.pop()
        self._row_held[row] = True
        return row

    def map_pages(self, batch_idx: int, logical_start: int, physical_pages: ArrayLike) -> None:
        """Append pages to a row. Cached pages are shared; unbound pages become private to the row."""
        start = self._held_row_pages(batch_idx)
        pages = self._as_pages(physical_pages)
        if logical_start != start:
            word = "overlaps" if logical_start < start else "leaves a gap after"
            raise MappingError(f"mapping at page {logical_start} {word} the {start} pages of row {batch_idx}")
        end = start + len(pages)
        if end > self.max_pages_per_row:
            raise MappingError(f"row {batch_idx} would have {end} pages, limit {self.max_pages_per_row}")
        owners = self._owner[pages]
        unbound = owners == UNBOUND
        if not (unbound | (owners == CACHED)).all():
            bad = int(pages[~unbound & (owners != CACHED)][0])
            raise OwnershipError(f"page {bad} is neither cached nor unbound (owner {int(self._owner[bad])})")
        self.require_distinct(pages, MappingError)
        self._append(batch_idx, start, pages)  # from here on nothing fails
        self._owner[pages[unbound]] = batch_idx

    def get_pages(self, batch_idx: int, start: int, end: int) -> Pages:
        """A read-only copy of the row's pages [start, end)."""
        have = self._held_row_pages(batch_idx)
        if not 0 <= start <= end <= have:
            raise MappingError(f"pages {start}..{end} requested of row {batch_idx}, which has {have}")
        pages: Pages = self._matrix[batch_idx, start:end].astype(np.int64)
        pages.setflags(write=False)  # a tree node may share the array
        return pages

    def _fits(self, pages: int, have: int) -> bool:
        return pages <= self.max_pages_per_row and pages - have <= self._n_free + self.pages_reclaimable

    def reserve(self, batch_idx: int, kv_length: int) -> bool:
        """Grow a row to `kv_length` positions, evicting if needed. Returns False, with nothing changed, if it
        cannot."""
        have, want = self._held_row_pages(batch_idx), self.pages_for(kv_length)
        if want <= have:
            return True
        if not self._fits(want, have):
            return False
        self._ensure_free(want - have)
        pages = self._next_free(want - have)
        self._append(batch_idx, have, pages)  # from here on nothing fails
        self._owner[pages] = batch_idx
        self._n_free -= want - have
        return True

    def reserve_many(self, rows: NDArray[np.integer], kv_lengths: NDArray[np.integer]) -> int:
        """`reserve` for distinct rows, in order. Returns the number of leading rows that succeeded."""
        if len(rows) < 2:  # the vectorized path is slower for a single row
            return sum(self.reserve(*entry) for entry in zip(rows.tolist(), kv_lengths.tolist(), strict=True))
        rows = rows.astype(np.int64)  # numpy's index type
        self._require_held(rows)
        have = self._row_pages[rows]
        need = np.maximum(-(-kv_lengths // self.page_size) - have, 0)
        ends = np.cumsum(need)
        fits = (ends <= self._n_free + self.pages_reclaimable) & (have + need <= self.max_pages_per_row)
        done = len(rows) if fits.all() else int(fits.argmin())
        total = int(ends[done - 1]) if done else 0
        if total == 0:
            return done
        self._ensure_free(total)
        pages = self._next_free(total)
        growing = np.flatnonzero(need[:done])
        grown, first, count = rows[growing], have[growing], need[growing]
        if total == len(growing):
            owners, columns = grown, first
        else:
            owners, columns = np.repeat(grown, count), ragged_arange(first, count)
        self._matrix[owners, columns] = pages
        self._owner[pages] = owners
        self._n_free -= total
        self._row_pages[grown] = first + count
        return done

    def truncate(self, batch_idx: int, kv_length: int) -> int:
        """Free the pages beyond `kv_length` positions and return their number. They must be private to the row."""
        have, keep = self._held_row_pages(batch_idx), self.pages_for(max(kv_length, 0))
        if keep >= have:
            return 0
        tail = self.get_pages(batch_idx, keep, have)
        if not (self._owner[tail] == batch_idx).all():
            raise OwnershipError(f"row {batch_idx} shares pages beyond page {keep}: they cannot be trimmed")
        self.release_pages(tail)
        self._row_pages[batch_idx] = keep
        return have - keep

    def remap(self, batch_idx: int, start: int, pages: Pages) -> int:
        """Replace the row's pages from `start` on by these cached ones, and free those that were private to it.
        Returns their number.

        Steps in flight may still read the freed pages. That is safe: the next owner of such a page writes to it in
        a later step, and all steps run in order on one device stream.
        """
        old = self.get_pages(batch_idx, start, start + len(pages))
        if not (self._owner[pages] == CACHED).all():
            raise OwnershipError(f"row {batch_idx} can only be remapped to cached pages")
        own = old[self._owner[old] == batch_idx]
        self._remapped[batch_idx] = min(start, self._remapped.get(batch_idx, start))
        self._matrix[batch_idx, start : start + len(pages)] = pages
        self.release_pages(own)
        return len(own)

    @property
    def has_remapped(self) -> bool:
        """Whether `remapped` would name any row."""
        return bool(self._remapped)

    def remapped(self, rows: NDArray[np.integer]) -> list[tuple[int, int]]:
        """(index in `rows`, first page) of the rows with remapped entries that the device lacks. The caller sends
        their entries from that page on."""
        return [(i, self._remapped[row]) for i, row in enumerate(rows.tolist()) if row in self._remapped]

    def on_sent(self, rows: NDArray[np.integer]) -> None:
        """Note that the entries of these rows that `remapped` names go to the device with a step."""
        if self._remapped:
            for row in rows.tolist():
                self._remapped.pop(row, None)

    def erase(self, batch_idx: int) -> None:
        """Free a row and exactly the pages that are private to it."""
        pages = self.get_pages(batch_idx, 0, self._held_row_pages(batch_idx))
        self.release_pages(pages[self._owner[pages] == batch_idx])
        self._remapped.pop(batch_idx, None)
        self._row_pages[batch_idx] = 0
        self._row_held[batch_idx] = False
        self._free_rows.append(batch_idx)

    def _append(self, row: int, start: int, pages: Pages) -> None:
        end = start + len(pages)
        self._matrix[row, start:end] = pages
        self._row_pages[row] = end

    def _held_row_pages(self, row: int) -> int:
        if not 0 < row < self.max_batch_size or not self._row_held[row]:
            raise RowError(f"row {row} is not held (rows are 1..{self.max_batch_size - 1})")
        return int(self._row_pages[row])

    def _require_held(self, rows: NDArray[np.integer]) -> None:
        if int(rows.min()) < 1 or int(rows.max()) >= self.max_batch_size or not self._row_held[rows].all():
            raise RowError(f"rows must be held and in 1..{self.max_batch_size - 1}")
        self.require_distinct(rows, RowError)  # type: ignore[arg-type]

    # ------------------------------------------------------------ conservation

    def keep_only(self, held: Collection[int], cached: Pages) -> None:
        """After a fault in the middle of a change: these rows keep their pages, and all but theirs and the cached
        ones are free."""
        counts, remapped = self._row_pages, self._remapped
        self._clear_rows(held)
        self._remapped.update((row, first) for row, first in remapped.items() if row in held)
        self._free_all()
        for row in held:
            self._row_pages[row] = counts[row]
            self._owner[self._matrix[row, : counts[row]]] = row
        self._owner[cached] = CACHED
        free = np.flatnonzero(self._owner == FREE)[::-1]
        self._n_free = len(free)
        self._stack[: self._n_free] = free

    def check(self) -> None:
        """Check that every page is exactly one of free, cached and private (I7). Raises ConservationError."""
        free = self.free_pages
        self._expect("free", free, np.flatnonzero(self._owner == FREE))
        cached = self.prefix_cache.owned_pages() if self.prefix_cache is not None else free[:0]
        self._expect("cached", cached, np.flatnonzero(self._owner == CACHED))
        held = np.flatnonzero(self._row_held)
        if set(self._free_rows) != set(range(1, self.max_batch_size)) - set(held.tolist()):
            raise ConservationError("the free rows and the held rows are not each other's complement")
        counts = self._row_pages[held]
        if int(self._row_pages.sum()) != int(counts.sum()):
            raise ConservationError("a row that nobody holds has pages")
        rows = np.repeat(held, counts)
        mapped = self._matrix[rows, ragged_arange(np.zeros_like(counts), counts)]
        owners = self._owner[mapped]
        if not ((owners == rows) | (owners == CACHED)).all():
            raise ConservationError("a row maps a page that is neither its own nor cached")
        self._expect("private", mapped[owners != CACHED], np.flatnonzero(self._owner > UNBOUND))
        pairs = rows * self.n_pages + mapped
        if len(np.unique(pairs)) != len(pairs):
            raise ConservationError("a row maps a page twice")
        if self._owner[0] != RESERVED or (self._owner[1:] == RESERVED).any():
            raise ConservationError("page 0, and only page 0, is reserved")
        if self._n_free + self.pages_cached + self.pages_private != self.total_pages:
            raise ConservationError("free + cached + private is not all pages")

    @staticmethod
    def _expect(state: str, listed: Pages, marked: NDArray[np.integer]) -> None:
        if not np.array_equal(np.sort(listed), marked):
            raise ConservationError(f"{len(listed)} pages are listed as {state}, {len(marked)} are marked so")


_ANY = 2**31 - 1
"""Positions: more than any sequence has."""


class RowTable(PageTable):
    """A page table without pages: rows of sequences that a step computes whole, and whose keys nobody keeps.
    `max_batch_size` rows, each of which holds any number of positions. Row 0 is reserved."""

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
