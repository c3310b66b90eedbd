"""A group of layers that keep a state: each position changes it, so a state serves at one position alone.

The state of a running row belongs to the row, and no other row reads it. What others can go on from is a
*snapshot*: a copy of the state after an exact position p, filed under the page that ends there. So a snapshot
moves and goes with its page, and the prefix cache need not know of it.

    a row's prompt   |---------|---------------|--------|-|
    snapshots      reused    ends of messages         before its last token

A step makes the snapshots that lie in its positions: before the last token of a prompt, at the ends of its
messages, where it branches off from what the cache knew, and every `EVERY` positions of what is long. The group
takes back those that nobody has used for longest. A row that begins holds its snapshot until its first step is
launched: later steps may overwrite it, because steps run in order.

A step that is launched changes its rows' states for good. No sequence goes back to an earlier position but by
beginning anew: a late stop and a zombie change a state that nobody reads again. Rejected drafts are the exception:
a row keeps its state before them, so a step with drafts makes no snapshot there or behind, and none is drafted
over a regular snapshot (`before_next`).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from petiole.cache.exceptions import ConservationError
from petiole.cache.groups.companions import CompanionPool
from petiole.cache.groups.serving import Served
from petiole.cache.pages.page_pool import Int32s, Pages

EVERY = 2048
"""Positions between two snapshots of a long sequence that has no other reason for one, up to whole pages."""

FIRST_ENDS, LAST_ENDS = 4, 12
"""The ends of this many messages, of the first and of the last of a prompt, get a snapshot."""

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What a step keeps of its rows' states, in the order of the rows and positions. of: whose each is, as an
    index in the step; positions: after which the state is copied; slots: where to; pages: those that end
    there."""

    of: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: Int32s
    pages: Pages


class StateGroup:
    """Layers with a state, over `n_snapshots` snapshots, of which 0 is reserved and stands for "none". keeps:
    whether any are made. The counters say at how many positions look-ups found that this group could serve, and
    how many lay behind."""

    def __init__(self, n_snapshots: int, *, page_size: int, n_pages: int, n_rows: int, keeps: bool) -> None:
        self.pool = CompanionPool(n_snapshots, n_pages)
        self.page_size, self.keeps = page_size, keeps
        self.hit_tokens = self.missed_tokens = self.made = 0
        self._n_rows = n_rows
        self.reset()

    def reset(self) -> None:
        """See `LayerGroup`."""
        self.pool.free_all()
        self._begun: dict[int, int] = {}  # row -> the page whose snapshot it holds until its first step
        self._begins = np.zeros(self._n_rows, dtype=np.int64)  # where each row's first step begins
        self._ends: dict[int, NDArray[np.int64]] = {}
        self._last = np.zeros(self._n_rows, dtype=np.int64)  # of each row, the last of its ends

    # ------------------------------------------------------------ look-ups

    def serves(self, pages: Pages) -> Served:
        """See `LayerGroup`."""
        return np.concatenate([[True], self.pool.of[pages] != 0])

    # ------------------------------------------------------------ rows

    def begin(self, row: int, pages: Pages) -> None:
        """Let a row go on after cached pages, the last of which has a snapshot."""
        self._begins[row] = len(pages) * self.page_size
        if len(pages):
            self.pool.hold(pages[-1:])
            self._begun[row] = int(pages[-1])

    def source(self, row: int) -> int:
        """The snapshot from which a row's first step goes on; 0: from the first position."""
        page = self._begun.get(row)
        return 0 if page is None else int(self.pool.of[page])

    def keep(self, row: int, ends: ArrayLike) -> None:
        """Note positions from which other sequences may go on. An end directly after another one adds nothing."""
        size = self.page_size
        noted = np.asarray(ends, dtype=np.int64) // size * size
        found = np.union1d(self._ends.get(row, _NONE), noted[noted > self._begins[row]])
        found = found[~np.isin(found - size, found)]
        if len(found) > FIRST_ENDS + LAST_ENDS:
            found = np.concatenate([found[:FIRST_ENDS], found[-LAST_ENDS:]])
        self._ends[row] = found
        self._last[row] = found[-1] if len(found) else 0

    def make(
        self, matrix: Int32s, rows: Pages, starts: NDArray[np.integer], ends: NDArray[np.integer]
    ) -> Snapshots:
        """Take a snapshot for each position that deserves one of a step that computes these positions of the
        rows. Of more than the pool has, the last."""
        index, positions = self._deserving(rows, starts, ends)
        pages = matrix[rows[index], positions // self.page_size - 1].astype(np.int64)
        kept = np.flatnonzero(self.pool.of[pages] == 0)
        kept = kept[len(kept) - min(len(kept), self.pool.available) :]
        index, positions, pages = index[kept], positions[kept], pages[kept]
        with ExitStack() as undo:  # a snapshot that no step makes would serve what it does not hold
            self.pool.attach(pages)
            undo.callback(self.pool.detach, pages)
            self.pool.drop(pages, np.zeros(len(pages), dtype=np.bool_))
            made = Snapshots(index, positions, self.pool.of[pages], pages)
            undo.pop_all()
        self.made += len(pages)
        return made

    def before_next(self, position: int) -> int | None:
        """The last position before the next regular snapshot behind this one; None: none are made. A step with
        drafts ends there at the latest, because it would pass over the snapshot."""
        return (position // self._every + 1) * self._every - 1 if self.keeps else None

    def unmake(self, snapshots: Snapshots) -> None:
        """Undo `make`, before the step is launched."""
        self.pool.detach(snapshots.pages)
        self.made -= len(snapshots.pages)

    @property
    def _every(self) -> int:
        return -(-EVERY // self.page_size) * self.page_size

    def _deserving(
        self, rows: Pages, starts: NDArray[np.integer], ends: NDArray[np.integer]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index in the step, and position."""
        every = self._every
        noted, due = starts < self._last[rows], starts // every < ends // every
        if not self.keeps or not (noted | due).any():
            return _NONE, _NONE
        found = []
        for i in np.flatnonzero(noted | due).tolist():
            start, end = int(starts[i]), int(ends[i])
            own = self._ends.get(int(rows[i]), _NONE)
            regular = np.arange((start // every + 1) * every, end + 1, every, dtype=np.int64)
            found.append(np.union1d(own[(own > start) & (own <= end)], regular))
        counts = [len(one) for one in found]
        return np.repeat(np.flatnonzero(noted | due), counts), np.concatenate(found)

    def slide(self, matrix: Int32s, rows: Pages, starts: NDArray[np.integer]) -> None:
        """A step of these rows is launched: it has read the snapshots that they began with."""
        if self._begun:
            for row in rows.tolist():
                self._let_go(row)

    def remap(self, row: int, start: int, old: Pages, new: Pages) -> None:
        """The row's pages become others of equal content, which get the snapshots that they lack."""
        of = self.pool.of
        moves = (old != new) & (of[new] == 0) & (of[old] != 0)
        self.pool.move(old[moves], new[moves])

    def cut(self, row: int, n_pages: int) -> None:
        """The row has lost its pages from column `n_pages` on. Their snapshots went with them."""

    def end(self, matrix: Int32s, row: int) -> None:
        """The row is given back."""
        self._let_go(row)
        self._ends.pop(row, None)
        self._begins[row] = self._last[row] = 0

    def _let_go(self, row: int) -> None:
        page = self._begun.pop(row, None)
        if page is not None:
            self.pool.drop(np.array([page]), np.zeros(1, dtype=np.bool_))

    # ------------------------------------------------------------ conservation

    def keep_only(self, matrix: Int32s, held: Collection[int]) -> None:
        for row in set(range(self._n_rows)) - set(held):
            self._begun.pop(row, None)
            self._ends.pop(row, None)
            self._begins[row] = self._last[row] = 0
        self.pool.keep_only(self._holds())

    def _holds(self) -> NDArray[np.int64]:
        """By page of the table: how many rows use its snapshot."""
        holds = np.zeros(self.pool.n_pages, dtype=np.int64)
        for page in self._begun.values():
            holds[page] += 1
        return holds

    def check(self, matrix: Int32s, row_pages: NDArray[np.int64], n_pages: int) -> None:
        """Check the books of the group. Raises ConservationError."""
        for row, page in self._begun.items():
            column = int(self._begins[row]) // self.page_size - 1
            if not 0 <= column < row_pages[row] or matrix[row, column] != page:
                raise ConservationError(f"row {row} began behind page {page}, which it does not map there")
        self.pool.check(self._holds())
