"""The KV of running sequences: the one place that takes locks, rows and pages, and gives them back.

A scheduler starts, grows and ends sequences; it never sees a lock or a free list.  `KVCacheManager.start`
is a transaction: match, lock, take a row, map what is reused, take pages for the rest; whatever fails on the
way, everything is put back.  Who owns the pages of a row while it runs:

    position   0            reused          published              capacity
               |--- cached ---|--- cached or mine ---|--- private ---|
               found by start   published: matchable;   not yet launched
                                mine where an equal
                                sequence was first

`published` grows at each launch (`publish`): stream order makes KV matchable as soon as its kernels are
queued.  The row gives back what it owns and nothing else, so an interval that the cache already had from
another sequence is no special case.

All of it belongs to one thread.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import MisalignedError, ReleasedError
from cache.namespace import CacheNamespace
from cache.page_table import PageTable
from cache.prefix import CacheStats, Peek, PrefixCache
from cache.tokens import CacheTokens, TokensLike, as_tokens, kept_tokens, page_boundary, reuse_limit


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Pages by state, and rows; `free + reclaimable` is what a new sequence can have."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reclaimable: int  # cached and evictable: no running sequence holds them
    pages_private: int
    rows_total: int
    rows_held: int
    nodes: int
    cache: CacheStats


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of `publish`: positions `start .. end` are now the cache's and came from this row."""

    start: int
    end: int

    @property
    def kv_taken(self) -> int:
        return self.end - self.start


class KVAllocation:
    """One running sequence's row.  Made by `KVCacheManager.start`, ended by `finish` or `discard`."""

    __slots__ = ("_generation", "_manager", "_node", "namespace", "published", "reused", "row")

    def __init__(
        self, manager: "KVCacheManager", row: int, reused: int, node: Any, namespace: CacheNamespace | None
    ) -> None:
        self._manager = manager
        self._node = node  # what the row's one lock is on; it ends at position `published`
        self._generation = manager.generation
        self.row = row
        self.reused = reused
        self.published = reused
        self.namespace = namespace

    @property
    def released(self) -> bool:
        return self.row == 0

    @property
    def kv_capacity(self) -> int:
        """KV positions that the row's pages hold."""
        return self._manager.table.capacity(self.row)

    @property
    def stale(self) -> bool:
        """True when what the row reuses or published may hold no valid KV any more: after a `flush`, or when
        another sequence withdrew what this one builds on.  A stale row caches nothing."""
        if self._generation != self._manager.generation:
            return True
        return self._node is not None and not self._manager.cache.is_attached(self._node)

    def reserve(self, kv_length: int) -> bool:
        """Give the first `kv_length` positions pages, evicting if needed; False, and nothing changed, if there
        are not enough."""
        self._require_running()
        return self._manager.table.reserve(self.row, kv_length)

    def publish(self, tokens: TokensLike, kv_length: int) -> Published:
        """Make the first `kv_length` positions matchable: their kernels are launched, or will be next.

        `tokens` are the sequence's tokens (at least those positions).  Only whole pages are published, and
        never a part of an image; a later call goes on where this one stopped.
        """
        self._require_running()
        manager, table = self._manager, self._manager.table
        tokens = kept_tokens(tokens)
        if not 0 <= kv_length <= min(tokens.kv_length, self.kv_capacity):
            raise MisalignedError(
                f"kv_length {kv_length} to publish, {tokens.kv_length} in tokens and {self.kv_capacity} in pages"
            )
        end = page_boundary(tokens.codes, kv_length, table.page_size)
        if end <= self.published or self.stale:
            return Published(self.published, self.published)
        start = self.published
        result = manager.cache.insert(
            tokens.prefix(end),
            table.get_pages(self.row, 0, end // table.page_size),
            self.namespace,
            self._node,
            tokens.token_index(start) if self._node is not None else 0,
            start // table.page_size if self._node is not None else 0,
        )
        self._move_lock(result.node)
        self.published = max(start, result.end)
        return Published(result.start, result.end)

    def unpublish(self, keep_kv: int | None = None) -> bool:
        """The launch failed before dispatch: take back what was published beyond `keep_kv` (default: all).

        True: nothing of it is matchable and its pages are private again; the row may be launched once more.
        False: another running sequence has matched it.  It is not matchable any more, but this allocation and
        those others are `stale`: their KV was never computed, so they must be discarded and started anew.
        """
        self._require_running()
        keep = self.reused if keep_kv is None else max(keep_kv, self.reused)
        if self.published <= keep or self._node is None:
            return True
        if self.stale:
            return False
        table = self._manager.table
        pages = table.get_pages(self.row, 0, self.published // table.page_size)
        kept = self._manager.cache.withdraw(self._node, keep, pages, self.row)
        if kept is None:
            return False
        self._node, self.published = kept
        return True

    def trim(self, kv_length: int) -> int:
        """Give back the pages beyond `kv_length` positions (rejected drafts); returns how many."""
        self._require_running()
        if kv_length < self.published:
            raise MisalignedError(f"cannot trim to {kv_length}: positions below {self.published} are published")
        return self._manager.table.truncate(self.row, kv_length)

    def finish(self, tokens: TokensLike, kv_length: int) -> Published:
        """The end, or a preemption: cache the first `kv_length` positions (committed ones only, in whole
        pages), unlock, give back what is private, and the row."""
        published = self.publish(tokens, kv_length)
        self.discard()
        return published

    def discard(self) -> None:
        """Give everything back and cache nothing more.

        What was published stays matchable: if its KV may be invalid, `unpublish` first, or `flush` the manager.
        """
        self._require_running()
        node, self._node = self._node, None
        row, self.row = self.row, 0
        self._manager.table.erase(row)
        self._manager.cache.unlock(node)

    def _move_lock(self, node: Any) -> None:
        if node is not self._node:
            self._manager.cache.lock(node)
            self._manager.cache.unlock(self._node)
            self._node = node

    def _require_running(self) -> None:
        if self.row == 0:
            raise ReleasedError("this allocation has been given back")


class KVCacheManager:
    """A page table and a prefix cache, as the scheduler sees them."""

    def __init__(self, table: PageTable, cache: PrefixCache[Any]) -> None:
        self.table = table
        self.cache = cache
        self.generation = 0  # of the KV: what was started before a flush caches nothing
        table.set_prefix_cache(cache)

    @property
    def pages_available(self) -> int:
        """Pages a sequence can still have: free ones and those that eviction would free.  O(1)."""
        return self.table.pages_available + self.cache.evictable_page_count()

    def pages_needed(self, kv_length: int) -> int:
        return self.table.pages_for(kv_length)

    def match_length(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> int:
        """KV positions that a start would reuse now.  Changes nothing."""
        return self._peek(tokens, namespace).kv_length

    def can_start(
        self,
        tokens: TokensLike,
        namespace: CacheNamespace | None = None,
        kv_length: int | None = None,
        first_chunk: int | None = None,
    ) -> bool:
        """Whether `start` with the same arguments would succeed.  Changes nothing."""
        tokens = as_tokens(tokens)
        found = self._peek(tokens, namespace)
        return self._fits(found, self._target(tokens.kv_length, found.kv_length, kv_length, first_chunk))

    def start(
        self,
        tokens: TokensLike,
        namespace: CacheNamespace | None = None,
        kv_length: int | None = None,
        first_chunk: int | None = None,
    ) -> KVAllocation | None:
        """Give a sequence a row, what the cache has of it, and pages up to `kv_length` positions (default: all
        of `tokens`); with `first_chunk`, at most so many positions beyond the reused ones.

        At least one position is left to compute, reuse ends at a page boundary and splits no image.  None, with
        nothing changed, when rows or pages do not suffice.
        """
        tokens = as_tokens(tokens)
        if not self.table.rows_available:
            return None
        worst = self.pages_needed(max(tokens.kv_length, kv_length or 0))
        if worst > self.table.pages_available and not self.can_start(tokens, namespace, kv_length, first_chunk):
            return None
        reusable = tokens.prefix(self._reuse_limit(tokens))
        match = self.cache.match_prefix(reusable, namespace)
        reused, node = match.matched_kv_length, match.last_node
        with ExitStack() as undo:
            undo.callback(self.cache.stats.forget_lookup, reused, reusable.kv_length)
            self.cache.lock(node)
            undo.callback(self.cache.unlock, node)
            row = self.table.allocate()
            undo.callback(self.table.erase, row)
            self.table.map_pages(row, 0, match.matched_pages)
            if not self.table.reserve(row, self._target(tokens.kv_length, reused, kv_length, first_chunk)):
                return None
            undo.pop_all()
        return KVAllocation(self, row, reused, node, namespace)

    def reserve_many(self, allocations: Sequence[KVAllocation], kv_lengths: NDArray[np.integer]) -> int:
        """`reserve` for many distinct allocations at once, in order: how many leading ones succeeded.

        `kv_lengths` is an integer array with one entry each.  The others are left as they were.
        """
        rows = np.array([allocation.row for allocation in allocations], dtype=np.int64)
        return self.table.reserve_many(rows, kv_lengths)

    def flush(self) -> int:
        """Make nothing matchable any more (new weights, or KV of doubtful value); returns pages freed.

        Running sequences keep their rows and become `stale`: they may run on, and cache nothing at their end.
        """
        self.generation += 1
        return self.cache.flush()

    def usage(self) -> KVUsage:
        table, cache = self.table, self.cache
        return KVUsage(
            pages_total=table.total_pages,
            pages_free=table.pages_available,
            pages_cached=cache.total_cached_pages,
            pages_reclaimable=cache.evictable_page_count(),
            pages_private=table.pages_private,
            rows_total=table.max_batch_size - 1,
            rows_held=table.num_allocated,
            nodes=cache.node_count,
            cache=cache.stats,
        )

    def check(self) -> None:
        """The conservation check over table and cache; raises `ConservationError`."""
        self.cache.check()
        self.table.check()

    def _reuse_limit(self, tokens: CacheTokens) -> int:
        if tokens.kv_length == 0:
            raise MisalignedError("a sequence needs at least one token")
        return reuse_limit(tokens.codes, self.table.page_size)

    def _peek(self, tokens: TokensLike, namespace: CacheNamespace | None) -> Peek:
        tokens = as_tokens(tokens)
        return self.cache.peek(tokens.prefix(self._reuse_limit(tokens)), namespace)

    def _target(self, n: int, reused: int, kv_length: int | None, first_chunk: int | None) -> int:
        target = n if kv_length is None else kv_length
        return max(reused, target if first_chunk is None else min(target, reused + first_chunk))

    def _fits(self, found: Peek, target: int) -> bool:
        pages = self.pages_needed(target)
        more = pages - self.pages_needed(found.kv_length)
        evictable = self.cache.evictable_page_count() - found.reclaimable_pages
        return (
            self.table.rows_available > 0
            and pages <= self.table.max_pages_per_row
            and more <= self.table.pages_available + evictable
        )
