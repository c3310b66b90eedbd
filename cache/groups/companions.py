"""A pool beside the page table: pages that accompany pages of the table.

A page of the table stands for positions of a sequence, whoever owns it: a row, or the prefix cache. So what else
belongs to these positions is filed under that page's number, and moves with it: when the cache takes a page over,
when a row shares a cached page, when a match finds it. A companion lives at most as long as its page, and may go
before it.

    free       on the free stack
    held       the companion of a page, in use by `holds` rows: nobody may take it
    idle       the companion of a page that no row uses: taken when pages run out, the ordinary before the kept

free + held + idle is all companions but companion 0, which is reserved and stands for "none".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from petiole.cache.exceptions import ConservationError, MisalignedError, OutOfPagesError
from petiole.cache.pages.page_pool import Int32s, Pages
from petiole.cache.prefix.eviction import AgeQueue


class CompanionPool:
    """Companions 1..size-1 for the `n_pages` pages of a page table. Methods take distinct pages of the table."""

    def __init__(self, size: int, n_pages: int) -> None:
        if size < 2:
            raise MisalignedError(f"the size of a pool must be at least 2, got {size}")
        self.size, self.n_pages = size, n_pages
        self.evicted = 0
        self.free_all()

    def free_all(self) -> None:
        size, n_pages = self.size, self.n_pages
        self.of: Int32s = np.zeros(n_pages, dtype=np.int32)  # by page of the table: its companion, or 0
        self._page: Pages = np.zeros(size, dtype=np.int64)  # by companion: its page, or 0
        self._holds: Int32s = np.zeros(size, dtype=np.int32)
        self._stack: Pages = np.arange(size - 1, -1, -1, dtype=np.int64)
        self._n_free = size - 1
        self._ordinary, self._kept = AgeQueue(size), AgeQueue(size)

    @property
    def total(self) -> int:
        return self.size - 1

    @property
    def free(self) -> int:
        return self._n_free

    @property
    def idle(self) -> int:
        return len(self._ordinary) + len(self._kept)

    @property
    def held(self) -> int:
        return self.total - self.free - self.idle

    @property
    def available(self) -> int:
        """How many companions `attach` can give."""
        return self.free + self.idle

    def idle_of(self, pages: Pages) -> int:
        """How many of these pages have a companion that is idle."""
        companions = self._companions(pages)
        return int(np.count_nonzero(self._holds[companions] == 0))

    def attach(self, pages: Pages) -> None:
        """Give each page a companion, which one row holds. None may have one. Raises OutOfPagesError."""
        count = len(pages)
        if count > self.available:
            raise OutOfPagesError(f"cannot attach {count} pages: {self.free} are free and {self.idle} idle")
        if count > self.free:
            self._evict(count - self.free)
        top = self._n_free
        self._n_free = top - count
        companions = self._stack[top - count : top][::-1].copy()
        self.of[pages] = companions
        self._page[companions] = pages
        self._holds[companions] = 1

    def detach(self, pages: Pages) -> None:
        """Free the companions that these pages have, held or not."""
        companions = self._companions(pages)
        if len(companions):
            self._forget(companions)
            self._free(companions)

    def hold(self, pages: Pages) -> None:
        """Keep the companions of these pages for one more row. All must have one."""
        companions = self.of[pages].astype(np.int64)
        assert companions.all(), "a row's window has positions without a page"
        self._forget(companions)
        self._holds[companions] += 1

    def drop(self, pages: Pages, kept: NDArray[np.bool_]) -> None:
        """Undo one `hold` or `attach` for each of these pages, of which rows may have some in common. Companions
        that no row holds any more become idle, as kept or as ordinary ones: as the last row says."""
        companions = self.of[pages].astype(np.int64)
        np.subtract.at(self._holds, companions, 1)
        _, behind = np.unique(companions[::-1], return_index=True)
        last = np.sort(len(companions) - 1 - behind)
        companions, kept = companions[last], kept[last]
        idle = self._holds[companions] == 0
        self._ordinary.add(companions[idle & ~kept])
        self._kept.add(companions[idle & kept])

    def move(self, old: Pages, new: Pages) -> None:
        """Make the companions of the old pages those of the new ones. Old ones must have one, new ones none."""
        companions = self.of[old]
        self.of[old] = 0
        self.of[new] = companions
        self._page[companions] = new

    def _companions(self, pages: Pages) -> Pages:
        companions = self.of[pages]
        return companions[companions > 0].astype(np.int64)

    def _evict(self, count: int) -> None:
        taken = self._ordinary.take(count)
        if len(taken) < count:
            taken = np.concatenate([taken, self._kept.take(count - len(taken))])
        self.evicted += len(taken)
        self._free(taken)

    def _forget(self, companions: Pages) -> None:
        self._ordinary.discard(companions)
        self._kept.discard(companions)

    def _free(self, companions: Pages) -> None:
        self.of[self._page[companions]] = 0
        self._page[companions] = 0
        self._holds[companions] = 0
        end = self._n_free + len(companions)
        self._stack[self._n_free : end] = companions[::-1]
        self._n_free = end

    def keep_only(self, holds: NDArray[np.integer]) -> None:
        """After a fault in the middle of a change: forget all companions but those that rows use. holds: as of
        `check`."""
        pages = np.flatnonzero(holds)
        companions = self.of[pages]
        self.free_all()
        self.of[pages], self._page[companions], self._holds[companions] = companions, pages, holds[pages]
        free = np.flatnonzero(self._page[1:] == 0)[::-1] + 1
        self._n_free = len(free)
        self._stack[: self._n_free] = free

    def check(self, holds: NDArray[np.integer]) -> None:
        """Check the pool's books. holds: by page of the table, how many rows use its companion. Raises
        ConservationError."""
        attached = np.flatnonzero(self._page)
        pages = self._page[attached]
        if not np.array_equal(self.of[pages], attached) or int(np.count_nonzero(self.of)) != len(attached):
            raise ConservationError("companions and pages do not name each other")
        free = np.sort(self._stack[: self._n_free])
        if not np.array_equal(free, np.setdiff1d(np.arange(1, self.size), attached)):
            raise ConservationError(f"{self._n_free} companions are free, {self.total - len(attached)} of no page")
        if (holds[self.of == 0] > 0).any() or not np.array_equal(self._holds[attached], holds[pages]):
            raise ConservationError("the holds on companions are not those of the rows")
        for companion in attached.tolist():
            queued = (companion in self._ordinary) + (companion in self._kept)
            if queued != (self._holds[companion] == 0):
                raise ConservationError(f"companion {companion} is held, or idle, or both (queued {queued} times)")
        for queue in (self._ordinary, self._kept):
            queue.check()
        idle = int(np.count_nonzero(self._holds[attached] == 0))
        if self.idle != idle or self.free + self.held + self.idle != self.total:
            raise ConservationError(f"{self.idle} companions are counted as idle, and {idle} are")
