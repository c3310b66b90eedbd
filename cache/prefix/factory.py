"""Creates the prefix cache that the configuration names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from petiole.cache.exceptions import CacheValueError
from petiole.cache.pages.page_table import PageTable
from petiole.cache.prefix.block_cache import BlockCache
from petiole.cache.prefix.interface import NoPrefixCache, PrefixCache
from petiole.cache.prefix.radix import RadixPrefixCache

CacheKind = Literal["radix", "block", "off"]


def build_prefix_cache(
    kind: CacheKind, page_table: PageTable, max_cached_pages: int | None = None
) -> PrefixCache[Any]:
    """A prefix cache over a page table. `max_cached_pages` limits its size (None: no limit, 0: caches nothing)."""
    match kind:
        case "radix":
            return RadixPrefixCache(page_table, max_cached_pages)
        case "block":
            return BlockCache(page_table, max_cached_pages)
        case "off":
            return NoPrefixCache(page_table)
    raise CacheValueError(f"prefix cache must be one of {', '.join(get_args(CacheKind))}, got {kind!r}")
