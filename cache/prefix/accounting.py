"""What both prefix caches count: their look-ups and pages, and the limit of their size.

The subclasses of `CountingCache` implement the index (a tree or a table of blocks). Counting owned and evictable
pages and evicting under a size limit are the same for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from petiole.cache.exceptions import ConservationError, EvictionError, MisalignedError
from petiole.cache.pages.page_pool import PagePool, Pages
from petiole.cache.prefix.eviction import EvictionHeap, Item


@dataclass(slots=True)
class CacheStats:
    """Counters since the start."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0  # KV positions matched by look-ups
    missed_tokens: int = 0  # KV positions looked up and not matched
    inserted_pages: int = 0
    evictions: int = 0  # leaves or blocks evicted, partial ones included
    evicted_pages: int = 0
    splits: int = 0
    coalesced: int = 0
    depth: int = 0  # maximum number of nodes walked by a look-up

    @property
    def hit_rate(self) -> float:
        """Fraction of looked-up KV positions that were matched."""
        total = self.hit_tokens + self.missed_tokens
        return self.hit_tokens / total if total else 0.0

    def record_lookup(self, found: int, asked: int, depth: int) -> None:
        if found:
            self.hits += 1
        else:
            self.misses += 1
        self.hit_tokens += found
        self.missed_tokens += asked - found
        if depth > self.depth:
            self.depth = depth

    def forget_lookup(self, found: int, asked: int) -> None:
        """Undo `record_lookup` for a sequence that could not start and will be looked up again."""
        if found:
            self.hits -= 1
        else:
            self.misses -= 1
        self.hit_tokens -= found
        self.missed_tokens -= asked - found


Held = TypeVar("Held")  # the unit of locking: a node or the pages of a chain


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
