"""`KVCacheManager` for a model whose layers are in groups: amounts are those of each pool, and a match ends where
every group can go on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from numpy.typing import ArrayLike

from petiole.cache.allocation import GroupUsage, KVAllocation, KVCacheManager, KVUsage, StateUsage
from petiole.cache.groups.serving import deepest
from petiole.cache.groups.table import GroupedTable, WindowPages
from petiole.cache.namespace import CacheNamespace
from petiole.cache.pages.amounts import PageCounts
from petiole.cache.pages.page_pool import Pages
from petiole.cache.pages.page_table import PageTable, RowTable
from petiole.cache.prefix.factory import CacheKind, build_prefix_cache
from petiole.cache.prefix.interface import NoPrefixCache
from petiole.cache.tokens import CacheTokens, TokensLike, as_tokens, page_boundary


class GroupedManager(KVCacheManager):
    """A `KVCacheManager` over a `GroupedTable`."""

    table: GroupedTable
    has_groups = True

    # ------------------------------------------------------------ amounts

    @property
    def pages_available(self) -> PageCounts:
        return PageCounts(self._table_pages_available, *(group.pool.available for group in self.table.windows))

    def new_pages(self, row: int, kv_length: int) -> PageCounts:
        n = self.pages_needed(kv_length)
        own = max(0, n - self.table.page_count(row))
        return PageCounts(own, *(group.new_pages(row, n) for group in self.table.windows))

    def pages_held(self, row: int) -> PageCounts:
        return PageCounts(self.table.page_count(row), *(group.held(row) for group in self.table.windows))

    def pages_to_start(
        self, tokens: TokensLike, namespace: CacheNamespace | None = None, kv_length: int | None = None
    ) -> PageCounts:
        tokens = as_tokens(tokens)
        reusable = self._reusable(tokens, namespace)
        cached, reused = self.cache.peek(reusable, namespace), self.cache.find(reusable, namespace)
        target = self._target(tokens.kv_length, cached.kv_length, kv_length, None)
        own, n = self._use(cached, target), self.pages_needed(target)
        return PageCounts(own, *(group.pages_to_start(reused, n) for group in self.table.windows))

    # ------------------------------------------------------------ sequences

    def known_length(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> int:
        return len(self._known(as_tokens(tokens), namespace)) * self.table.page_size

    def start(
        self,
        tokens: TokensLike,
        namespace: CacheNamespace | None = None,
        kv_length: int | None = None,
        first_chunk: int | None = None,
    ) -> KVAllocation | None:
        """See `KVCacheManager`. Where the prompt branches off from what is cached, others will."""
        tokens = as_tokens(tokens)
        known, asked = self._known(tokens, namespace), self._reuse_limit(tokens)
        found = [deepest([group.serves(known)], len(known)) for group in self.table.groups]
        missed, size = asked - self._reusable(tokens, namespace).kv_length, self.table.page_size
        allocation = super().start(tokens, namespace, kv_length, first_chunk)
        if allocation is None:
            return None
        with ExitStack() as undo:
            undo.callback(allocation.discard)
            self.keep(allocation.row, [len(known) * size, allocation.reused])
            if self.table.states is not None:  # from where an equal prompt goes on
                self.table.states.keep(allocation.row, [asked])
            undo.pop_all()
        self.cache.stats.missed_tokens += missed
        for group, n in zip(self.table.groups, found, strict=True):
            group.hit_tokens += n * size
            group.missed_tokens += asked - n * size
        return allocation

    def keep(self, row: int, ends: ArrayLike) -> None:
        """Note positions of a running row from which other sequences may go on."""
        self.table.keep(row, ends)

    def _known(self, tokens: CacheTokens, namespace: CacheNamespace | None) -> Pages:
        """The pages that the cache knows of these tokens, whichever groups can go on after them."""
        return self.cache.find(tokens.prefix(self._reuse_limit(tokens)), namespace)

    def _reusable(self, tokens: CacheTokens, namespace: CacheNamespace | None) -> CacheTokens:
        known, size = self._known(tokens, namespace), self.table.page_size
        served = [group.serves(known) for group in self.table.groups]
        n = deepest(served, len(known))
        while (cut := page_boundary(tokens.codes, n * size, size) // size) < n:
            n = deepest(served, cut)
        return tokens.prefix(n * size)

    def usage(self) -> KVUsage:
        groups = tuple(
            GroupUsage(
                window=group.window,
                pages_total=group.pool.total,
                pages_free=group.pool.free,
                pages_held=group.pool.held,
                pages_evicted=group.pool.evicted,
                hit_tokens=group.hit_tokens,
                missed_tokens=group.missed_tokens,
            )
            for group in self.table.windows
        )
        return replace(super().usage(), groups=groups, states=self._state_usage())

    def _state_usage(self) -> StateUsage | None:
        group = self.table.states
        if group is None:
            return None
        return StateUsage(
            states_total=self.table.max_batch_size - 1,
            states_held=self.table.num_allocated,
            snapshots_total=group.pool.total,
            snapshots_free=group.pool.free,
            snapshots_made=group.made,
            snapshots_evicted=group.pool.evicted,
            hit_tokens=group.hit_tokens,
            missed_tokens=group.missed_tokens,
        )


def build_manager(
    kind: CacheKind,
    n_pages: int,
    page_size: int = 1,
    max_batch_size: int = 64,
    max_pages_per_row: int | None = None,
    *,
    max_cached_pages: int | None = None,
    windows: Sequence[WindowPages] = (),
    snapshots: int = 0,
    longest_step: int = 1,
) -> KVCacheManager:
    """A page table, a prefix cache over it, and their manager. n_pages: with the reserved one; with no other one,
    rows take none, and nothing is cached. windows: the pools of groups of layers. snapshots: of layers with a
    state. Without both, nothing of this package is used. longest_step: the most positions of a row that a step may
    write."""
    if n_pages == 1:
        rows = RowTable(max_batch_size)
        return KVCacheManager(rows, NoPrefixCache(rows))
    sizes = n_pages, page_size, max_batch_size, max_pages_per_row
    if not windows and not snapshots:
        table = PageTable(*sizes)
        return KVCacheManager(table, build_prefix_cache(kind, table, max_cached_pages))
    grouped = GroupedTable(
        *sizes, windows=windows, longest_step=longest_step, snapshots=snapshots, keeps_states=kind != "off"
    )
    return GroupedManager(grouped, build_prefix_cache(kind, grouped, max_cached_pages))
