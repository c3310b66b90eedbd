"""The order of eviction: a heap with versioned entries and lazy updates.

An item is pushed once, when it becomes evictable, with its access time at that moment. A later access does not
touch the heap. When an entry is popped and its item has been used since, the item is pushed back with its current
access time. The recorded time is never later than the current one, so the order is exact LRU. Discarding an item
removes its version; its dead entry is dropped when popped, or when over half of the heap's entries are dead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)  # the unit of eviction: a leaf or a block


_SLACK = 64


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
