"""The page pool: the owner of each page, and the stack of free pages.

    owner == RESERVED (-3)   page 0, never allocated
    owner == FREE     (-2)   on the free stack
    owner == CACHED   (-1)   owned by the prefix cache; any number of rows may map it
    owner == UNBOUND  (0)    private: allocated, but in no row yet
    owner == row      (>0)   private to that row, mapped exactly once

The array `_owner` is the single source of truth about ownership.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from petiole.cache.exceptions import MisalignedError, OutOfPagesError, OwnershipError

Pages = NDArray[np.int64]  # a list of pages; int64 is numpy's index type
Int32s = NDArray[np.int32]

RESERVED, FREE, CACHED, UNBOUND = -3, -2, -1, 0
_LONG = 256  # minimum length for which checking for consecutive pages pays off


class PageCache(Protocol):
    """The part of a prefix cache that the pool calls. The cache owns some of the pool's pages."""

    @property
    def total_cached_pages(self) -> int: ...

    def owned_pages(self) -> Pages: ...

    def evictable_page_count(self) -> int: ...

    def evict(self, num_pages: int) -> int: ...


class PagePool:
    """Pages 1..n_pages-1 of `page_size` positions, and their owners; page 0 is reserved."""

    least_pages = 2

    def __init__(self, n_pages: int, page_size: int, n_rows: int = 0) -> None:
        for field, value, lowest in (("n_pages", n_pages, self.least_pages), ("page_size", page_size, 1)):
            if value < lowest:
                raise MisalignedError(f"{field} must be at least {lowest}, got {value}")
        self.n_pages = n_pages
        self.page_size = page_size
        self.prefix_cache: PageCache | None = None
        self._free_all()
        self._order = np.arange(max(n_pages, n_rows), dtype=np.int32)
        self._scratch = np.zeros_like(self._order)

    def _free_all(self) -> None:
        self._owner: Int32s = np.full(self.n_pages, FREE, dtype=np.int32)
        self._owner[0] = RESERVED
        self._stack: Pages = np.arange(self.n_pages - 1, -1, -1, dtype=np.int64)  # page 1 is popped first
        self._n_free = self.n_pages - 1

    @property
    def total_pages(self) -> int:
        """Number of pages, without the reserved one."""
        return self.n_pages - 1

    @property
    def pages_available(self) -> int:
        """Number of free pages."""
        return self._n_free

    @property
    def pages_reclaimable(self) -> int:
        """Number of cached pages that eviction could free."""
        return self.prefix_cache.evictable_page_count() if self.prefix_cache is not None else 0

    @property
    def pages_cached(self) -> int:
        return self.prefix_cache.total_cached_pages if self.prefix_cache is not None else 0

    @property
    def pages_private(self) -> int:
        """Number of private pages: those of rows, and allocated ones in no row yet."""
        return self.total_pages - self._n_free - self.pages_cached

    @property
    def free_pages(self) -> Pages:
        """The free pages, in no useful order (a copy)."""
        return self._stack[: self._n_free].copy()

    def owner(self, page: int) -> int:
        """The owner code of a page."""
        return self._owner.item(page)

    def pages_for(self, kv_length: int) -> int:
        """The number of pages needed for `kv_length` positions."""
        return -(-kv_length // self.page_size)

    def set_prefix_cache(self, cache: PageCache) -> None:
        """Attach the cache from which pages are evicted when the pool runs out."""
        if self.prefix_cache is not None and self.prefix_cache is not cache and self.pages_cached:
            raise OwnershipError(f"another cache still owns {self.pages_cached} pages of this table")
        self.prefix_cache = cache

    def allocate_pages(self, count: int) -> Pages:
        """Allocate `count` unbound pages, evicting if needed. Raises OutOfPagesError if there are not enough."""
        if count < 0:
            raise MisalignedError(f"page count must not be negative, got {count}")
        self._ensure_free(count)
        pages = self._next_free(count)
        self._owner[self._index(pages)] = UNBOUND
        self._n_free -= count
        pages.setflags(write=False)  # a tree node may share the array
        return pages

    def release_pages(self, pages: Pages) -> None:
        """Free pages. The caller must own them, and they must be distinct: neither is checked."""
        end = self._n_free + len(pages)
        self._owner[self._index(pages)] = FREE
        self._stack[self._n_free : end] = pages[::-1]
        self._n_free = end

    def adopt_pages(self, pages: Pages) -> None:
        """Transfer private pages to the cache. Rows that map them keep their mappings."""
        where = self._index(pages)
        owners = self._owner[where]
        if len(pages) and int(owners.min()) < UNBOUND:
            bad = int(pages[owners < UNBOUND][0])
            raise OwnershipError(f"page {bad} is not private (owner {int(self._owner[bad])}), it cannot be cached")
        if where is pages:
            self.require_distinct(pages, OwnershipError)
        self._owner[where] = CACHED

    def disown_pages(self, pages: Pages, batch_idx: int) -> None:
        """Transfer pages from the cache back to the row that inserted them."""
        self._owner[pages] = batch_idx

    def owns(self, batch_idx: int, pages: Pages) -> NDArray[np.bool_]:
        """bool [len(pages)]: whether each page is private to the row (`UNBOUND`: in no row yet)."""
        owned: NDArray[np.bool_] = self._owner[pages] == batch_idx
        return owned

    def require_distinct(self, pages: Pages, error: type[Exception]) -> None:
        """Raise `error` if a page occurs twice. Linear time, without sorting."""
        order = self._order[: len(pages)]
        self._scratch[pages] = order
        if self._scratch[pages].tobytes() != order.tobytes():
            raise error(f"one is listed twice among {len(pages)}")

    def _index(self, pages: Pages) -> Pages | slice:
        """A slice for many consecutive pages (about ten times faster in numpy), else the pages themselves."""
        n = len(pages)
        if n < _LONG or pages.item(-1) - pages.item(0) != n - 1 or (pages[1:] <= pages[:-1]).any():
            return pages
        return slice(pages.item(0), pages.item(-1) + 1)

    def _as_pages(self, pages: ArrayLike) -> Pages:
        given = np.asarray(pages, dtype=np.int64).reshape(-1)
        if len(given) and not (int(given.min()) > 0 and int(given.max()) < self.n_pages):
            raise OwnershipError(f"pages must be in 1..{self.n_pages - 1}, got {given.min()}..{given.max()}")
        return given

    def _ensure_free(self, count: int) -> None:
        short = count - self._n_free
        if short <= 0:
            return
        if short > self.pages_reclaimable:
            raise OutOfPagesError(
                f"cannot allocate {count} pages: {self._n_free} are free, {self.pages_reclaimable} evictable of "
                f"{self.pages_cached} cached (all other cached prefixes are locked by running sequences)"
            )
        assert self.prefix_cache is not None
        self.prefix_cache.evict(short)

    def _next_free(self, count: int) -> Pages:
        """The pages that the next `count` will be. The caller takes them, once nothing can fail any more."""
        return self._stack[self._n_free - count : self._n_free][::-1].copy()
