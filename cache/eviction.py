"""The LRU order both caches evict by: a heap with versions and lazy updates.

The idea: an entry is pushed once when an item becomes evictable, with the access time that it has then.
Touching it later costs nothing here: when the entry surfaces, the heap sees that the item is younger than the
entry says and pushes it back with its true time.  The recorded time is never later than the true one, so the
order is exact LRU.  An item that leaves the tree takes its version with it, and its entry is dropped when it
surfaces or when half of the heap is such dead wood.
"""

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_SLACK = 64


class EvictionHeap(Generic[Item]):
    """Evictable items, least recently used first; `accessed(item)` is an item's last access (a counter)."""

    def __init__(self, accessed: Callable[[Item], int]) -> None:
        self._accessed = accessed
        self._entries: list[tuple[int, int, Item]] = []
        self._versions: dict[Item, int] = {}
        self._next_version = 0

    def __len__(self) -> int:
        """Live items."""
        return len(self._versions)

    def __contains__(self, item: Item) -> bool:
        return item in self._versions

    @property
    def entries(self) -> int:
        """Entries, dead ones included."""
        return len(self._entries)

    def push(self, item: Item) -> None:
        """Make an item a candidate, unless it is one."""
        if item not in self._versions:
            self._push(item)

    def discard(self, item: Item) -> None:
        """Forget an item."""
        self._versions.pop(item, None)
        if len(self._entries) > 2 * len(self._versions) + _SLACK:
            self._entries = [entry for entry in self._entries if self._versions.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def pop(self) -> Item | None:
        """Take out the least recently used item, or None."""
        while self._entries:
            time, version, item = heapq.heappop(self._entries)
            if self._versions.get(item) != version:
                continue
            del self._versions[item]
            if self._accessed(item) == time:
                return item
            self._push(item)
        return None

    def clear(self) -> None:
        self._entries.clear()
        self._versions.clear()

    def _push(self, item: Item) -> None:
        self._next_version += 1
        self._versions[item] = self._next_version
        heapq.heappush(self._entries, (self._accessed(item), self._next_version, item))
