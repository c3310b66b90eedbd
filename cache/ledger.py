"""What both prefix caches count: pages owned, pages nobody holds, the LRU order and the cap.

A cache decides which page leads to which; how many pages it owns, how many of them it could give back and how it
makes room under a cap are the same arithmetic for a tree and for a table of blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cache.errors import ConservationError, EvictionError, MisalignedError
from cache.eviction import EvictionHeap
from cache.pool import PagePool, Pages
from cache.prefix import CacheStats

Item = TypeVar("Item", bound=Hashable)  # what is evicted: a leaf, a block
Held = TypeVar("Held")  # what is locked: a node, the pages of a chain


class CacheLedger(ABC, Generic[Item, Held]):
    """Counts and cap of a prefix cache; `accessed(item)` is the time of an item's last use, by `_tick`."""

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
        self._cached = 0
        self._reclaimable = 0

    @property
    def total_cached_pages(self) -> int:
        return self._cached

    def evictable_page_count(self) -> int:
        return self._reclaimable

    def evict(self, needed_pages: int) -> int:
        """Free at least `needed_pages`, least recently used first; returns how many. EvictionError: too many."""
        if needed_pages > self._reclaimable:
            raise EvictionError(f"cannot evict {needed_pages} pages: {self._reclaimable} are evictable")
        if needed_pages <= 0:
            return 0
        gone, evictions = self._take_oldest(needed_pages)
        self.page_table.release_pages(gone)
        self.stats.evictions += evictions
        self.stats.evicted_pages += len(gone)
        return len(gone)

    @abstractmethod
    def _take_oldest(self, needed_pages: int) -> tuple[Pages, int]:
        """Take the least recently used pages out of the cache; the pages, and how many items they were."""

    @abstractmethod
    def _pin(self, held: Held) -> None:
        """Keep something from being evicted."""

    @abstractmethod
    def _unpin(self, held: Held) -> None:
        """Take back one `_pin`."""

    def _make_room(self, new_pages: int, behind: Held) -> int:
        """How many of `new_pages` may be cached behind `behind` under the cap, after evicting others for them."""
        if self.max_cached_pages is None:
            return new_pages
        excess = self._cached + new_pages - self.max_cached_pages
        if excess > 0:
            self._pin(behind)
            self.evict(min(excess, self._reclaimable))
            self._unpin(behind)
        return max(0, min(new_pages, self.max_cached_pages - self._cached))

    def _tick(self) -> int:
        """The time of this use: later than all before it."""
        self._clock += 1
        return self._clock

    @staticmethod
    def _agree(facts: dict[str, tuple[int, int]]) -> None:
        """ConservationError unless what is kept is what is counted."""
        for fact, (kept, counted) in facts.items():
            if kept != counted:
                raise ConservationError(f"{fact}: {kept} kept, {counted} counted")
