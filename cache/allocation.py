"""KV allocation of running sequences: takes and releases their locks, rows and pages.

The scheduler starts, grows and ends sequences and handles no locks or free lists. `KVCacheManager.start` is a
transaction: match, lock, allocate a row, map the reused pages, reserve the rest; a failure rolls everything back.
Ownership of the pages of a running row:

    position   0            reused          published              capacity
               |--- cached ---|- cached or private --|--- private ---|
               matched by start published: matchable;   not published
                                private where the cache
                                had equal pages already

`published` grows by `publish`: KV is matchable as soon as its kernels are enqueued, because later steps run after
them on the stream. Once the positions are committed, `share` frees the row's copies of pages that
the cache already had, and uses the cache's pages. A row frees exactly the pages that it owns.

Not thread-safe: one thread owns the manager and all allocations.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from petiole.cache.exceptions import ConservationError, MisalignedError, ReleasedError
from petiole.cache.namespace import CacheNamespace
from petiole.cache.pages.amounts import Amount
from petiole.cache.pages.page_table import PageTable
from petiole.cache.prefix.accounting import CacheStats
from petiole.cache.prefix.interface import Peek, PrefixCache
from petiole.cache.tokens import CacheTokens, TokensLike, as_tokens, kept_tokens, page_boundary, reuse_limit


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The pool of a group of layers with a window. A new sequence can get the free and the cached pages.
    hit_tokens, missed_tokens: positions that look-ups found this group able to serve, and others."""

    window: int
    pages_total: int
    pages_free: int
    pages_held: int
    pages_evicted: int
    hit_tokens: int
    missed_tokens: int

    @property
    def pages_cached(self) -> int:
        return self.pages_total - self.pages_free - self.pages_held


@dataclass(frozen=True, slots=True)
class StateUsage:
    """The layers with a state. states: one a row. snapshots: states that others can go on from; those that are
    not free are evicted when more are made. hit_tokens, missed_tokens: as in `GroupUsage`."""

    states_total: int
    states_held: int
    snapshots_total: int
    snapshots_free: int
    snapshots_made: int
    snapshots_evicted: int
    hit_tokens: int
    missed_tokens: int


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Page and row counts; a new sequence can get `pages_free + pages_reclaimable` pages. groups: the pools beside
    the page table's own. states: of layers that keep one, if there are any."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reclaimable: int  # cached and not locked by a running sequence
    pages_private: int
    rows_total: int
    rows_held: int
    nodes: int
    cache: CacheStats
    groups: tuple[GroupUsage, ...] = ()
    states: StateUsage | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """The result of `publish`: the cache has taken positions [start, end) from this row."""

    start: int
    end: int


class KVAllocation:
    """The row and pages of a running sequence. Made by `KVCacheManager.start`, released by `finish` or `discard`.

    `reused`: positions matched at the start. `published`: positions that are matchable now.
    """

    __slots__ = ("_generation", "_manager", "_node", "_promised", "namespace", "published", "reused", "row")

    def __init__(
        self,
        manager: KVCacheManager,
        row: int,
        reused: int,
        node: Any,
        namespace: CacheNamespace | None,
        promised: int = 0,
    ) -> None:
        self._manager = manager
        self._node = node  # the locked node, which ends at position `published`
        self._generation = manager.generation
        self._promised = promised  # positions whose pages stay until the end
        self.row = row
        self.reused = reused
        self.published = reused
        self.namespace = namespace

    @property
    def node(self) -> Any:
        """The node that it has locked, or None."""
        return self._node

    @property
    def released(self) -> bool:
        return self.row == 0

    @property
    def kv_capacity(self) -> int:
        """Number of KV positions that the row's pages hold."""
        return self._manager.table.capacity(self.row)

    @property
    def stale(self) -> bool:
        """Whether the reused or published KV may be invalid: after a `flush`, or after another sequence withdrew
        pages that this one builds on. A stale row publishes nothing."""
        if self._generation != self._manager.generation:
            return True
        return self._node is not None and not self._manager.cache.is_attached(self._node)

    def reserve(self, kv_length: int) -> bool:
        """Reserve pages for the first `kv_length` positions, evicting if needed. Returns False, with nothing
        changed, if pages do not suffice."""
        self._require_running()
        return self._manager.table.reserve(self.row, kv_length)

    def publish(self, tokens: TokensLike, kv_length: int) -> Published:
        """Make the first `kv_length` positions matchable. Their kernels must be launched already or next.

        `tokens` are the sequence's tokens, at least up to there. Only whole pages and whole images are published.
        A later call continues where this one stopped.
        """
        self._require_running()
        manager, table = self._manager, self._manager.table
        if self.stale:
            return Published(self.published, self.published)
        tokens = kept_tokens(tokens)
        if not 0 <= kv_length <= min(tokens.kv_length, self.kv_capacity):
            raise MisalignedError(
                f"kv_length {kv_length} to publish, {tokens.kv_length} in tokens and {self.kv_capacity} in pages"
            )
        end = page_boundary(tokens.codes, kv_length, table.page_size)
        if end <= self.published:
            return Published(self.published, self.published)
        start = self.published
        pages = table.get_pages(self.row, 0, end // table.page_size)
        at = tokens.token_index(start), start // table.page_size
        result = manager.cache.insert(tokens.prefix(end), pages, self.namespace, self._node, *at, move_lock=True)
        self._node, self.published = result.node, max(start, result.end)
        return Published(result.start, result.end)

    def restored(self, tokens: TokensLike, kv_length: int) -> None:
        """Note that copies of KV have been enqueued into the row's pages up to here, a page boundary, as if
        `start` had matched them. Nothing has been computed yet."""
        self.publish(tokens, kv_length)
        self.reused = kv_length

    def share(self, kv_length: int) -> int:
        """Use the cache's pages for the published positions before `kv_length`, and free the row's own copies of
        them. Returns the number of pages freed.

        The row has copies if another sequence published equal positions first. The positions must be committed: a
        launch that may still fail needs its own pages to go back to."""
        self._require_running()
        table = self._manager.table
        first, end = self.reused // table.page_size, min(kv_length, self.published) // table.page_size
        copies = table.owns(self.row, table.get_pages(self.row, first, max(first, end)))
        if not copies.any() or self.stale:
            return 0
        start = first + int(copies.argmax())
        return table.remap(self.row, start, self._manager.cache.pages_of(self._node)[start:end])

    def unpublish(self, keep_kv: int) -> bool:
        """Withdraw the positions published beyond `keep_kv`, a former value of `published`, after a launch failed
        before dispatch. None of them may have been passed to `share`. If several rows of that launch have
        published, the last one to publish is the first to withdraw, since it may build on the others' positions.

        Returns True if their pages are private again; the row may then be launched again. Returns False if
        another running sequence has matched them. They are no longer matchable, but this allocation and the
        others are `stale`: their KV was never computed, so they must be discarded and restarted.
        """
        self._require_running()
        keep = max(keep_kv, self.reused)
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
        """Free the pages beyond `kv_length` positions (rejected drafts), but none of those that `start` was asked
        for. Returns their number."""
        self._require_running()
        if kv_length < self.published:
            raise MisalignedError(f"cannot trim to {kv_length}: positions below {self.published} are published")
        return self._manager.table.truncate(self.row, max(kv_length, self._promised))

    def finish(self, tokens: TokensLike, kv_length: int) -> Published:
        """Publish the first `kv_length` positions (which must be committed; whole pages only), then release the
        allocation. For the end or the preemption of a sequence."""
        published = self.publish(tokens, kv_length)
        self.discard()
        return published

    def discard(self) -> None:
        """Release the lock, the row and its private pages without publishing more.

        Published positions stay matchable. If their KV may be invalid, `unpublish` or `flush` the manager first.
        """
        self._require_running()
        manager, node, row = self._manager, self._node, self.row
        manager.running.pop(row, None)
        self._node, self.row = None, 0
        manager.table.erase(row)
        manager.cache.unlock(node)

    def check(self) -> None:
        """Check that the row shares no pages but those that it has locked. Raises ConservationError."""
        table, cache = self._manager.table, self._manager.cache
        pages = table.get_pages(self.row, 0, table.page_count(self.row))
        locked = cache.pages_of(self._node) if self._node is not None else pages[:0]
        if not np.isin(pages[~table.owns(self.row, pages)], locked).all():
            raise ConservationError(f"row {self.row} shares pages that it has not locked")

    def lose(self) -> None:
        """Note that the pages and the lock are gone, and with them all KV. The row stays, to be discarded."""
        self._node, self.published, self.reused, self._promised = None, 0, 0, 0

    def _require_running(self) -> None:
        if self.row == 0:
            raise ReleasedError("this allocation has been given back")


class KVCacheManager:
    """The page table and the prefix cache behind one interface for the scheduler. has_groups: whether groups of
    layers have pools of their own (`groups.manager`), so that an amount of pages is one of each pool."""

    has_groups = False

    def __init__(self, table: PageTable, cache: PrefixCache[Any]) -> None:
        self.table = table
        self.cache = cache
        self.generation = 0  # incremented by `flush`; allocations of older generations are stale
        self.running: dict[int, KVAllocation] = {}  # by row
        table.set_prefix_cache(cache)

    @property
    def pages_available(self) -> Amount:
        """Free pages plus evictable pages. O(1)."""
        return self._table_pages_available

    @property
    def _table_pages_available(self) -> int:
        return self.table.pages_available + self.cache.evictable_page_count()

    def pages_needed(self, kv_length: int) -> int:
        return self.table.pages_for(kv_length)

    def new_pages(self, row: int, kv_length: int) -> Amount:
        """The number of available pages that a row takes until its first `kv_length` positions are computed."""
        return max(0, self.table.pages_for(kv_length) - self.table.page_count(row))

    def pages_held(self, row: int) -> Amount:
        """The number of pages that a row has, shared ones included."""
        return self.table.page_count(row)

    def match_length(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> int:
        """The number of KV positions that `start` would reuse now. Changes nothing."""
        return self._peek(tokens, namespace).kv_length

    def known_length(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> int:
        """The number of leading positions that the cache knows, whether `start` could go on there or not. Changes
        nothing."""
        return self.match_length(tokens, namespace)

    def keep(self, row: int, ends: ArrayLike) -> None:
        """Note positions of a running row from which other sequences may go on. Only groups need to know."""

    def pages_to_start(
        self, tokens: TokensLike, namespace: CacheNamespace | None = None, kv_length: int | None = None
    ) -> Amount:
        """The number of available pages that `start` would use up now: new ones, and cached ones that it would
        lock. Changes nothing."""
        tokens = as_tokens(tokens)
        cached = self._peek(tokens, namespace)
        return self._use(cached, self._target(tokens.kv_length, cached.kv_length, kv_length, None))

    def can_start(
        self,
        tokens: TokensLike,
        namespace: CacheNamespace | None = None,
        kv_length: int | None = None,
        first_chunk: int | None = None,
    ) -> bool:
        """Whether `start` with the same arguments would succeed. Changes nothing."""
        tokens = as_tokens(tokens)
        cached = self._peek(tokens, namespace)
        return self._fits(cached, self._target(tokens.kv_length, cached.kv_length, kv_length, first_chunk))

    def start(
        self,
        tokens: TokensLike,
        namespace: CacheNamespace | None = None,
        kv_length: int | None = None,
        first_chunk: int | None = None,
    ) -> KVAllocation | None:
        """Allocate a row with the cached prefix of `tokens` and pages up to `kv_length` positions (default: all of
        `tokens`), which `trim` leaves in place. `first_chunk` limits the new positions to that many beyond the
        reused ones.

        Reuse leaves at least one position to compute, ends at a page boundary and splits no image. Returns None,
        with nothing changed, if rows or pages do not suffice.
        """
        tokens = as_tokens(tokens)
        if not self.table.rows_available:
            return None
        worst = self.pages_needed(max(tokens.kv_length, kv_length or 0))
        if worst > self.table.pages_available and not self.can_start(tokens, namespace, kv_length, first_chunk):
            return None
        reusable = self._reusable(tokens, namespace)
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
            allocation = self.running[row] = KVAllocation(self, row, reused, node, namespace, kv_length or 0)
            undo.pop_all()
        return allocation

    def flush(self) -> int:
        """Empty the prefix cache (new weights, or KV that may be invalid). Returns the number of pages freed.

        Running sequences keep their rows and become `stale`: they may continue, but publish nothing.
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
        """Check the invariants of the table and the cache. Raises `ConservationError`."""
        self.cache.check()
        self.table.check()

    def check_running(self) -> None:
        """Check that rows and locks are those of the running sequences. Raises `ConservationError`."""
        if self.table.held_rows != sorted(self.running):
            raise ConservationError(
                f"rows {self.table.held_rows} are held, {sorted(self.running)} are of sequences"
            )
        for allocation in self.running.values():
            allocation.check()
        self.cache.check_locks([one.node for one in self.running.values() if one.node is not None])

    def mend(self) -> None:
        """After a fault in the middle of a change, such as an eviction: keep what running sequences hold, free and
        forget everything else, and count it anew. Raises `ConservationError` if that cannot be known."""
        running = self.running
        if stale := [row for row, one in running.items() if one.stale]:
            raise ConservationError(f"the cache does not know what the rows {stale} hold")
        self.cache.keep_only([one.node for one in running.values() if one.node is not None])
        self.table.keep_only(running.keys(), self.cache.owned_pages())
        self.check()
        self.check_running()

    def reset(self) -> None:
        """Free all pages and forget what is cached. Rows stay with their sequences, which must start anew."""
        self.generation += 1
        self.table.reset(self.running.keys())
        self.cache.reset()
        for allocation in self.running.values():
            allocation.lose()

    def _reuse_limit(self, tokens: CacheTokens) -> int:
        if tokens.kv_length == 0:
            raise MisalignedError("a sequence needs at least one token")
        return reuse_limit(tokens.codes, self.table.page_size)

    def _peek(self, tokens: TokensLike, namespace: CacheNamespace | None) -> Peek:
        return self.cache.peek(self._reusable(as_tokens(tokens), namespace), namespace)

    def _reusable(self, tokens: CacheTokens, namespace: CacheNamespace | None) -> CacheTokens:
        """The part of the tokens that `start` looks up."""
        return tokens.prefix(self._reuse_limit(tokens))

    def _target(self, n: int, reused: int, kv_length: int | None, first_chunk: int | None) -> int:
        target = n if kv_length is None else kv_length
        return max(reused, target if first_chunk is None else min(target, reused + first_chunk))

    def _fits(self, cached: Peek, target: int) -> bool:
        return (
            self.table.rows_available > 0
            and self.pages_needed(target) <= self.table.max_pages_per_row
            and self._use(cached, target) <= self._table_pages_available
        )

    def _use(self, cached: Peek, target: int) -> int:
        return self.pages_needed(target) - self.pages_needed(cached.kv_length) + cached.reclaimable_pages
