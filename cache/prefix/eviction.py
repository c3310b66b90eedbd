"""Who is evicted first: of the items of a prefix cache, and of pages that accompany those of the page table."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from petiole.cache.exceptions import ConservationError
from petiole.cache.pages.page_pool import Pages

Item = TypeVar("Item", bound=Hashable)  # the unit of eviction: a leaf or a block


_SLACK = 64


class EvictionHeap(Generic[Item]):
    """Evictable items, least recently used first. `accessed(item)` is its last access time (a counter).

    A heap with versioned entries and lazy updates. An item is pushed once, when it becomes evictable, with its
    access time at that moment. A later access does not touch the heap. When an entry is popped and its item has
    been used since, the item is pushed back with its current access time. The recorded time is never later than
    the current one, so the order is exact LRU. Discarding an item removes its version; its dead entry is dropped
    when popped, or when over half of the heap's entries are dead."""

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


_MOST_DEAD = 1024


class AgeQueue:
    """Pages of a pool of `n_pages` that nobody holds, oldest first: those that were given back longest ago.

    Pages arrive in runs, as arrays, so adding and taking some hundreds of pages takes a few array operations. A
    page that was used since has another time, so its entry in an older run is dead. Dead entries are dropped when
    they are reached, or when most entries are dead."""

    def __init__(self, n_pages: int) -> None:
        self._times = np.zeros(n_pages, dtype=np.int64)  # when a page was added; 0: it is not here
        self._runs: deque[tuple[int, Pages]] = deque()
        self._now = 0
        self._entries = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __contains__(self, page: int) -> bool:
        return bool(self._times[page])

    def add(self, pages: Pages) -> None:
        """Add distinct pages, as the youngest. A page that is here already becomes one of them."""
        if not len(pages):
            return
        self._now += 1
        self._live += int(np.count_nonzero(self._times[pages] == 0))
        self._times[pages] = self._now
        self._runs.append((self._now, pages))
        self._entries += len(pages)
        if self._entries > 2 * self._live + _MOST_DEAD:
            self._runs = deque((time, live) for time, run in self._runs if len(live := self._of(time, run)))
            self._entries = self._live

    def discard(self, pages: Pages) -> None:
        """Remove distinct pages, if they are here."""
        self._live -= int(np.count_nonzero(self._times[pages]))
        self._times[pages] = 0

    def take(self, count: int) -> Pages:
        """Remove and return the `count` oldest pages; all of them if there are fewer."""
        taken: list[Pages] = []
        missing = count
        while missing > 0 and self._runs:
            time, entries = self._runs[0]
            run = self._of(time, entries)
            self._runs.popleft()
            self._entries -= len(entries)
            if len(run) > missing:
                self._runs.appendleft((time, run[missing:]))
                self._entries += len(run) - missing
                run = run[:missing]
            self._times[run] = 0
            self._live -= len(run)
            missing -= len(run)
            taken.append(run)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def check(self) -> None:
        """Raises ConservationError if a page is here and in no run, or counted wrongly."""
        queued = sum(len(self._of(time, run)) for time, run in self._runs)
        here = int(np.count_nonzero(self._times))
        if not queued == here == self._live:
            raise ConservationError(f"{here} pages are here, {queued} are in runs, and {self._live} are counted")

    def _of(self, time: int, run: Pages) -> Pages:
        live: Pages = run[self._times[run] == time]
        return live
