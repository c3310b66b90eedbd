"""What the engine needs of a prefix cache, whichever one is configured.

A prefix cache maps token prefixes to pages that hold their KV.  It owns the pages it was given by `insert`;
rows map them under a *lock*, and what is not locked may be evicted.  A `node` names a cached prefix: a tree
node in the radix cache, a chain of blocks in the block cache.  **Whoever keeps a node keeps a lock on it**:
without one it may be gone after the next call.

Positions (`kv`) count KV positions from the start of the sequence.  `insert` takes pages from the first
position that the cache does not have yet; the positions it took are `InsertResult.start .. .end`.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from cache.namespace import CacheNamespace
from cache.pool import PagePool, Pages
from cache.tokens import CacheTokens, TokensLike, as_tokens

Node = TypeVar("Node")
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class MatchResult(Generic[Node]):
    """The longest cached prefix of a sequence.  Do not write to `matched_pages`: the cache shares it."""

    matched_pages: Pages
    matched_kv_length: int
    matched_token_count: int
    last_node: Node | None
    tokens: CacheTokens

    @property
    def unmatched_tokens(self) -> CacheTokens:
        return self.tokens.suffix(self.matched_kv_length)


@dataclass(slots=True)
class InsertResult(Generic[Node]):
    """What `insert` did: `node` ends at position `end`, and the pages of positions `start .. end` were taken.

    Pages of earlier positions that the cache already had stay with the caller; `end` is short of the tokens
    given when a cap on cached pages left no room (`node` is None if nothing at all is cached).
    """

    node: Node | None
    inserted_pages: int
    start: int
    end: int


class Peek(NamedTuple):
    """What a match would find: positions, and how many of its pages are evictable as long as nobody locks it."""

    kv_length: int
    reclaimable_pages: int


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, cheap enough to be always on."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0  # KV positions found
    missed_tokens: int = 0  # KV positions looked for and not found
    inserted_pages: int = 0
    evictions: int = 0  # leaves or blocks evicted, wholly or in part
    evicted_pages: int = 0
    splits: int = 0
    coalesced: int = 0
    depth: int = 0  # nodes on the deepest path that a lookup has walked

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up KV positions that were found."""
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
        """Take back a lookup whose sequence could not start: it will be looked up again."""
        if found:
            self.hits -= 1
        else:
            self.misses -= 1
        self.hit_tokens -= found
        self.missed_tokens -= asked - found


class PrefixCache(Protocol[Node]):
    """The protocol of `RadixPrefixCache`, `BlockManager` and `NoPrefixCache`."""

    page_table: PagePool
    stats: CacheStats

    @property
    def total_cached_pages(self) -> int:
        """Pages that the cache owns."""

    @property
    def node_count(self) -> int:
        """Tree nodes or blocks."""

    def evictable_page_count(self) -> int:
        """Pages that `evict` could free, in O(1)."""

    def peek(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Peek:
        """What `match_prefix` would find, without changing anything."""

    def match_prefix(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> MatchResult[Node]:
        """The longest cached prefix; it becomes the most recently used one."""

    def insert(
        self,
        tokens: TokensLike,
        pages: ArrayLike,
        namespace: CacheNamespace | None = None,
        from_node: Node | None = None,
        from_token_idx: int = 0,
        from_page_idx: int = 0,
    ) -> InsertResult[Node]:
        """Make `tokens` matchable; `pages` are the private pages of all of them.

        `from_node` is a locked node that ends at page `from_page_idx` (token `from_token_idx`) of the same
        sequence; what lies before it is not looked at again.
        """

    def withdraw(self, node: Node, keep_kv: int, pages: Pages, batch_idx: int) -> tuple[Node | None, int] | None:
        """Un-insert what row `batch_idx` (mapping `pages`) inserted between `keep_kv` and the end of `node`.

        The caller holds one lock on `node`; afterwards it holds it on the returned node instead, which ends at
        the returned position, and the pages taken back are private to the row again.  If somebody else holds or
        has extended what was inserted, it only stops being matchable: the result is None, and the caller keeps
        its lock until it lets go of the row.
        """

    def is_attached(self, node: Node) -> bool:
        """Whether a match can still reach the node."""

    def lock(self, node: Node | None) -> None:
        """Keep the node and all that leads to it from being evicted.  Locks count."""

    def unlock(self, node: Node | None) -> None:
        """Take back one `lock`."""

    def evict(self, needed_pages: int) -> int:
        """Free at least so many pages, least recently used first; returns how many."""

    def flush(self) -> int:
        """Make nothing matchable any more; returns pages freed.  Locked pages are freed by their last unlock."""

    def owned_pages(self) -> Pages:
        """All pages that the cache owns, for the conservation check."""

    def check(self) -> None:
        """Prove the invariants of the structure (slow: for tests and debug mode)."""


class NoPrefixCache:
    """Prefix caching switched off: finds nothing, takes nothing."""

    def __init__(self, page_table: PagePool) -> None:
        self.page_table = page_table
        self.stats = CacheStats()

    @property
    def total_cached_pages(self) -> int:
        return 0

    @property
    def node_count(self) -> int:
        return 0

    def evictable_page_count(self) -> int:
        return 0

    def peek(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Peek:
        return Peek(0, 0)

    def match_prefix(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> MatchResult[None]:
        return MatchResult(NO_PAGES, 0, 0, None, as_tokens(tokens))

    def insert(
        self,
        tokens: TokensLike,
        pages: ArrayLike,
        namespace: CacheNamespace | None = None,
        from_node: None = None,
        from_token_idx: int = 0,
        from_page_idx: int = 0,
    ) -> InsertResult[None]:
        return InsertResult(None, 0, from_page_idx, from_page_idx)

    def withdraw(self, node: None, keep_kv: int, pages: Pages, batch_idx: int) -> tuple[None, int] | None:
        return None, keep_kv

    def is_attached(self, node: None) -> bool:
        return True

    def lock(self, node: None) -> None:
        return None

    def unlock(self, node: None) -> None:
        return None

    def evict(self, needed_pages: int) -> int:
        return 0

    def flush(self) -> int:
        return 0

    def owned_pages(self) -> Pages:
        return NO_PAGES

    def check(self) -> None:
        return None
