"""Base class of both prefix caches: page counts, LRU order and the size limit.

The subclasses implement the index (a tree or a table of blocks). Counting owned and evictable pages and evicting
under a size limit are the same for both.

The order of eviction is a heap with versioned entries and lazy updates. An item is pushed once, when it becomes
evictable, with its access time at that moment. A later access does not touch the heap. When an entry is popped
and its item has been used since, the item is pushed back with its current access time. The recorded time is never
later than the current one, so the order is exact LRU. Discarding an item removes its version; its dead entry is
dropped when popped, or when over half of the heap's entries are dead.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from petiole.cache.exceptions import ConservationError, EvictionError, MisalignedError
from petiole.cache.pages.page_pool import PagePool, Pages
from petiole.cache.prefix.interface import CacheStats

Item = TypeVar("Item", bound=Hashable)  # the unit of eviction: a leaf or a block
Held = TypeVar("Held")  # the unit of locking: a node or the pages of a chain

_SLACK = 64


class CountingCache(ABC, Generic[Item, Held]):
    """Page counts and size limit of a prefix cache. `accessed(item)` is an item's last access time, by `_tick`."""

    def __init__(
        self, page_table: PagePool, max_cached_pages: int | None, accessed: Callable[[Item], int]
    ) -> None:
        if max_cached_pages is not None and max_cached_pages < 0:
            raise MisalignedError(f"max_cached_pages must not be negative, got {max_cached_pages}")
        self.page_table = page_table
        self.max_cached_pages = max_cached_pages
        self.stats = CacheStats()
        self._heap: EvictionHeap[Item] = EvictionHeap(accessed)
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """See `PrefixCache`."""
        self._heap.clear()
        self._cached = self._reclaimable = 0

    @property
    def total_cached_pages(self) -> int:
        return self._cached

    def evictable_page_count(self) -> int:
        return self._reclaimable

    def evict(self, needed_pages: int) -> int:
        """Free at least `needed_pages`, least recently used first. Returns the number. Raises EvictionError."""
        if needed_pages > self._reclaimable:
            raise EvictionError(f"cannot evict {needed_pages} pages: {self._reclaimable} are evictable")
        if needed_pages <= 0:
            return 0
        pages, evictions = self._take_oldest(needed_pages)
        self.page_table.release_pages(pages)
        self.stats.evictions += evictions
        self.stats.evicted_pages += len(pages)
        return len(pages)

    @abstractmethod
    def _take_oldest(self, needed_pages: int) -> tuple[Pages, int]:
        """Remove the least recently used pages from the cache. Returns them and the number of items affected."""

    @abstractmethod
    def _pin(self, held: Held) -> None:
        """Protect a unit from eviction."""

    @abstractmethod
    def _unpin(self, held: Held) -> None:
        """Undo one `_pin`."""

    def _make_room(self, new_pages: int, behind: Held) -> int:
        """Evict for `new_pages` that follow `behind`. Returns how many of them the size limit allows."""
        if self.max_cached_pages is None:
            return new_pages
        excess = self._cached + new_pages - self.max_cached_pages
        if excess > 0:
            self._pin(behind)
            try:
                self.evict(min(excess, self._reclaimable))
            finally:
                self._unpin(behind)
        return max(0, min(new_pages, self.max_cached_pages - self._cached))

    def _tick(self) -> int:
        """Advance the logical clock and return it."""
        self._clock += 1
        return self._clock

    @staticmethod
    def _agree(facts: dict[str, tuple[int, int]]) -> None:
        """Raise ConservationError unless each pair (kept, counted) is equal."""
        for fact, (kept, counted) in facts.items():
            if kept != counted:
                raise ConservationError(f"{fact}: {kept} kept, {counted} counted")


class EvictionHeap(Generic[Item]):
    """Evictable items, least recently used first. `accessed(item)` is its last access time (a counter)."""

    def __init__(self, accessed: Callable[[Item], int]) -> None:
        self._accessed = accessed
        self._entries: list[tuple[int, int, Item]] = []
        self._versions: dict[Item, int] = {}
        self._next_version = 0

    def __len__(self) -> int:
        """Number of live items."""
        return len(self._versions)

    def __contains__(self, item: Item) -> bool:
        return item in self._versions

    @property
    def entries(self) -> int:
        """Number of heap entries, including dead ones."""
        return len(self._entries)

    def push(self, item: Item) -> None:
        """Add an item, unless it is present."""
        if item not in self._versions:
            self._push(item)

    def discard(self, item: Item) -> None:
        """Remove an item, if present."""
        self._versions.pop(item, None)
        if len(self._entries) > 2 * len(self._versions) + _SLACK:
            self._entries = [entry for entry in self._entries if self._versions.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def pop(self) -> Item | None:
        """Remove and return the least recently used item, or None."""
        while self._entries:
            time, version, item = self._entries[0]
            if self._versions.get(item) != version:
                heapq.heappop(self._entries)
                continue
            used = self._accessed(item)
            del self._versions[item]  # until it is pushed the item is not here, as `in` says
            heapq.heappop(self._entries)
            if used == time:
                return item
            self._push(item)
        return None

    def clear(self) -> None:
        self._entries.clear()
        self._versions.clear()

    def _push(self, item: Item) -> None:
        self._next_version += 1
        version = self._next_version
        heapq.heappush(self._entries, (self._accessed(item), version, item))
        self._versions[item] = version
