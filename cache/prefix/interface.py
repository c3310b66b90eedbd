"""The interface of the prefix caches, and the cache that is used when prefix caching is off.

A prefix cache maps token prefixes to pages that hold their KV. It owns the pages passed to `insert`. Rows map
them under a *lock*; unlocked pages may be evicted. A `node` represents a cached prefix: a tree node in the radix
cache, a chain of blocks in the block cache. **Code that stores a node must hold a lock on it**: without a lock,
any later call may evict it.

Positions (`kv`) are KV positions from the start of the sequence. `insert` takes the pages from the first position
that is not cached yet: positions [`InsertResult.start`, `InsertResult.end`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from petiole.cache.namespace import CacheNamespace
from petiole.cache.pages.page_pool import PagePool, Pages
from petiole.cache.prefix.accounting import CacheStats
from petiole.cache.tokens import TokensLike

Node = TypeVar("Node")
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class MatchResult(Generic[Node]):
    """The longest cached prefix of a sequence. Do not modify `matched_pages`: the cache shares the array."""

    matched_pages: Pages
    matched_kv_length: int
    matched_token_count: int
    last_node: Node | None


@dataclass(slots=True)
class InsertResult(Generic[Node]):
    """The result of `insert`: `node` ends at position `end`; the cache took the pages of positions [start, end).

    Pages before `start` stay with the caller, because the cache has these positions already. `end` is less than
    the inserted length if the size limit left no room (`node` is None if no prefix is cached).
    """

    node: Node | None
    inserted_pages: int
    start: int
    end: int


class Peek(NamedTuple):
    """The result of a look-up without a lock: matched positions, and how many of their pages are evictable now."""

    kv_length: int
    reclaimable_pages: int


class PrefixCache(Protocol[Node]):
    """The protocol of `RadixPrefixCache`, `BlockCache` and `NoPrefixCache`. The bodies are those of a cache that
    matches nothing and stores nothing."""

    page_table: PagePool
    stats: CacheStats

    @property
    def total_cached_pages(self) -> int:
        """Number of pages that the cache owns."""
        return 0

    @property
    def node_count(self) -> int:
        """Number of tree nodes or blocks."""
        return 0

    def evictable_page_count(self) -> int:
        """Number of pages that `evict` could free. O(1)."""
        return 0

    def peek(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Peek:
        """The result that `match_prefix` would have. Changes nothing."""
        return Peek(0, 0)

    def find(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Pages:
        """The pages of the longest cached prefix. Changes nothing. Do not modify them."""
        return NO_PAGES

    def match_prefix(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> MatchResult[Node]:
        """The longest cached prefix. Marks it as most recently used."""
        return MatchResult(NO_PAGES, 0, 0, None)

    def insert(
        self,
        tokens: TokensLike,
        pages: ArrayLike,
        namespace: CacheNamespace | None = None,
        from_node: Node | None = None,
        from_token_idx: int = 0,
        from_page_idx: int = 0,
        move_lock: bool = False,
    ) -> InsertResult[Node]:
        """Make `tokens` matchable; `pages` are the pages of all of them.

        `from_node` is a locked node that ends at page `from_page_idx` (token `from_token_idx`) of the same
        sequence; the positions before it are not compared again. `move_lock`: the caller's lock on `from_node`
        moves to the node of the result. Whatever raises, the cache has taken no page, and the lock has not moved.
        """
        return InsertResult(None, 0, from_page_idx, from_page_idx)

    def withdraw(self, node: Node, keep_kv: int, pages: Pages, batch_idx: int) -> tuple[Node | None, int] | None:
        """Undo what row `batch_idx` (mapping `pages`) inserted between `keep_kv` and the end of `node`.

        The caller's lock on `node` moves up to the returned node. That node ends at the returned position, the
        last one at or before `keep_kv` where a node can end. What others inserted beyond it has no lock of the
        caller any more. The withdrawn pages are private to the row again. If another sequence has locked or
        extended the inserted part, it only becomes unmatchable: the result is None, and the caller keeps its lock
        until it releases the row.
        """
        return None, keep_kv

    def is_attached(self, node: Node) -> bool:
        """Whether a match can reach the node."""
        return True

    def pages_of(self, node: Node) -> Pages:
        """The pages of the prefix that the node represents, from its first position. Do not modify them."""
        return NO_PAGES

    def lock(self, node: Node | None) -> None:
        """Protect the node and its whole prefix from eviction. Locks are counted."""
        return None

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock`."""
        return None

    def evict(self, needed_pages: int) -> int:
        """Free at least `needed_pages`, least recently used first. Returns the number freed."""
        return 0

    def flush(self) -> int:
        """Make everything unmatchable. Returns the number of pages freed; the last unlock frees locked pages."""
        return 0

    def owned_pages(self) -> Pages:
        """All pages that the cache owns, for the conservation check."""
        return NO_PAGES

    def check(self) -> None:
        """Check the invariants of the cache (slow; for tests, debug mode and after a fault). Raises
        ConservationError."""
        return None

    def check_locks(self, nodes: Iterable[Node]) -> None:
        """Check that these nodes hold one lock each, and nobody else any. Raises ConservationError."""
        return None

    def keep_only(self, nodes: Iterable[Node]) -> None:
        """After a fault in the middle of a change: forget all but what these nodes hold, with one lock each. Each
        must be attached. The caller frees the other pages."""
        return None

    def reset(self) -> None:
        """Forget everything, locked or not. The caller frees the pages."""
        return None


class NoPrefixCache(PrefixCache[None]):
    """The cache used when prefix caching is off."""

    def __init__(self, page_table: PagePool) -> None:
        self.page_table = page_table
        self.stats = CacheStats()
