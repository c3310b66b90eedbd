"""A group of layers that see a window: each position reads the last W positions, its own included.

A running row holds a page of the group's pool for each position that its next steps may read, and for those that a
step writes. What falls behind becomes idle, and stays useful while nobody needs the page:

    position    0                     first                  start          end
                |------- idle --------|-------- held --------|-- the step --|
                 kept before an end,    W positions, and some
                 else ordinary          that wait their turn

Idle pages are taken in the order of their age, the ordinary ones first. Kept ones lie within W positions before an
*end*: of a message, a prompt or a sequence, or where a second prompt branched off. From there others go on.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike, NDArray

from petiole.cache.exceptions import ConservationError, MisalignedError
from petiole.cache.groups.companions import CompanionPool
from petiole.cache.groups.serving import Served
from petiole.cache.pages.page_pool import Int32s, Pages
from petiole.cache.pages.page_table import ragged_arange

IN_FLIGHT = 2
"""A row may end this many positions before the start of its newest step, and must serve there too."""

STRIDE = 16
"""A row gives back this many positions at a time."""

_NONE = np.empty(0, dtype=np.int64)


class WindowGroup:
    """Layers with a window of `window` positions, over a pool of `size` pages, for a table of `n_pages` pages and
    `n_rows` rows. longest_step: the most positions of a row that a step may write. The counters say how many
    positions look-ups found that this group could serve, and how many it could not."""

    def __init__(
        self, window: int, size: int, *, page_size: int, n_pages: int, n_rows: int, longest_step: int
    ) -> None:
        if window < 1:
            raise MisalignedError(f"a window must be at least 1, got {window}")
        self.window, self.page_size = window, page_size
        self.pool = CompanionPool(size, n_pages)
        self.most = most_pages(window, page_size, longest_step)
        self.hit_tokens = self.missed_tokens = 0
        self._reach = -(-(window - 1) // page_size)  # pages that a boundary needs before it
        self._n_rows = n_rows
        self.reset()

    def reset(self) -> None:
        """See `LayerGroup`."""
        self.pool.free_all()
        self._first = np.zeros(self._n_rows, dtype=np.int64)
        self._end = np.zeros(self._n_rows, dtype=np.int64)
        self._ends: dict[int, NDArray[np.int64]] = {}

    # ------------------------------------------------------------ look-ups

    def serves(self, pages: Pages) -> Served:
        """See `LayerGroup`."""
        at = np.arange(1, len(pages) + 1)
        absent = np.maximum.accumulate(np.where(self.pool.of[pages] == 0, at, 0))
        return np.concatenate([[True], at - absent >= np.minimum(at, self._reach)])

    def read_from(self, pages: Pages) -> Pages:
        """The last of these pages, of a cached prefix: those that the next position reads."""
        return pages[len(pages) - min(len(pages), self._reach) :]

    # ------------------------------------------------------------ rows

    def begin(self, row: int, pages: Pages) -> None:
        """Let a row go on after cached pages."""
        read = self.read_from(pages)
        self.pool.hold(read)
        self._first[row], self._end[row] = len(pages) - len(read), len(pages)

    def held(self, row: int) -> int:
        return int(self._end[row] - self._first[row])

    def new_pages(self, row: int, n_pages: int) -> int:
        """How many pages the row needs before its first `n_pages` pages are computed. It gives others back
        meanwhile, so they are at most as many as it may hold."""
        return max(0, min(n_pages - int(self._end[row]), self.most - self.held(row)))

    def pages_to_start(self, reused: Pages, n_pages: int) -> int:
        """How many available pages a row would take that reuses cached pages and computes up to `n_pages`."""
        read = self.read_from(reused)
        return max(0, min(n_pages - len(reused), self.most - len(read))) + self.pool.idle_of(read)

    def fitting(self, rows: Pages, wanted: NDArray[np.integer]) -> int:
        """How many leading rows `cover` can serve."""
        fits = np.cumsum(np.maximum(wanted - self._end[rows], 0)) <= self.pool.available
        return len(rows) if fits.all() else int(fits.argmin())

    def cover(self, matrix: Int32s, rows: Pages, wanted: NDArray[np.integer]) -> None:
        """Take pages, so that each row has one for each of its first `wanted` columns from its window on."""
        ends = self._end[rows]
        count = np.maximum(wanted - ends, 0)
        if not count.any():
            return
        owners, columns = np.repeat(rows, count), ragged_arange(ends, count)
        self.pool.attach(matrix[owners, columns].astype(np.int64))
        self._end[rows] = ends + count

    def slide(self, matrix: Int32s, rows: Pages, starts: NDArray[np.integer]) -> None:
        """Give back what lies behind the windows of rows whose later steps begin at `starts` or beyond."""
        first = (starts - (self.window - 1 + IN_FLIGHT)) // self.page_size
        due = first - self._first[rows] >= max(1, STRIDE // self.page_size)
        if due.any():
            self._give_back(matrix, rows[due], np.minimum(first[due], self._end[rows[due]]))

    def keep(self, row: int, ends: ArrayLike) -> None:
        """Note positions from which other sequences may go on."""
        self._ends[row] = np.union1d(self._ends.get(row, _NONE), np.asarray(ends, dtype=np.int64))

    def remap(self, row: int, start: int, old: Pages, new: Pages) -> None:
        """The row's pages from column `start` on become others of equal content. These get the companions that
        they lack."""
        of, columns = self.pool.of, np.arange(start, start + len(new))
        other = old != new
        moves = other & (of[new] == 0) & (of[old] != 0)
        held = other & ~moves & (columns >= self._first[row]) & (columns < self._end[row])
        self.pool.move(old[moves], new[moves])
        self.pool.hold(new[held])
        self.pool.drop(old[held], np.zeros(int(held.sum()), dtype=np.bool_))

    def cut(self, row: int, n_pages: int) -> None:
        """The row has lost its pages from column `n_pages` on."""
        self._end[row] = min(int(self._end[row]), n_pages)
        self._first[row] = min(int(self._first[row]), n_pages)

    def end(self, matrix: Int32s, row: int) -> None:
        """Give back everything that the row holds."""
        self._give_back(matrix, np.array([row]), self._end[[row]])
        self._first[row] = self._end[row] = 0
        self._ends.pop(row, None)

    def _give_back(self, matrix: Int32s, rows: Pages, until: NDArray[np.integer]) -> None:
        """Of each row the columns from its first one up to `until`."""
        first = self._first[rows]
        owners, columns = np.repeat(rows, until - first), ragged_arange(first, until - first)
        near = np.zeros(len(columns), dtype=np.bool_)
        for row in self._ends.keys() & set(rows.tolist()):
            near[owners == row] = self._near_an_end(row, columns[owners == row])
        self.pool.drop(matrix[owners, columns].astype(np.int64), near)
        self._first[rows] = until

    def _near_an_end(self, row: int, columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        ends = self._ends.get(row, _NONE)
        if not len(ends):
            return np.zeros(len(columns), dtype=np.bool_)
        begins = columns * self.page_size
        following = np.searchsorted(ends, begins, side="right")
        near = ends[np.minimum(following, len(ends) - 1)] - self.window < begins + self.page_size
        return near & (following < len(ends))

    # ------------------------------------------------------------ conservation

    def keep_only(self, matrix: Int32s, held: Collection[int]) -> None:
        for row in set(range(self._n_rows)) - set(held):
            self._first[row] = self._end[row] = 0
            self._ends.pop(row, None)
        self.pool.keep_only(self._holds(matrix))

    def _holds(self, matrix: Int32s) -> NDArray[np.int64]:
        """By page of the table: how many rows use its companion."""
        holds = np.zeros(self.pool.n_pages, dtype=np.int64)
        for row in range(self._n_rows):
            holds[matrix[row, self._first[row] : self._end[row]]] += 1
        return holds

    def check(self, matrix: Int32s, row_pages: NDArray[np.int64], n_pages: int) -> None:
        """Check the books of the group. Raises ConservationError."""
        for row in range(len(row_pages)):
            first, end = int(self._first[row]), int(self._end[row])
            if not 0 <= first <= end <= row_pages[row]:
                raise ConservationError(f"row {row} has {row_pages[row]} pages and holds [{first}, {end})")
        self.pool.check(self._holds(matrix))


def most_pages(window: int, page_size: int, longest_step: int) -> int:
    """The most pages that a row holds of a group with this window, whatever its length: its window, two steps, and
    what waits to be given back."""
    positions = window - 1 + IN_FLIGHT + max(STRIDE, page_size) + 2 * longest_step
    return -(-positions // page_size) + 1
