"""Creates the prefix cache that the configuration names."""

from typing import Any, Literal, TypeAlias, get_args

from cache.blocks import BlockManager
from cache.errors import CacheValueError
from cache.page_table import PageTable
from cache.prefix import NoPrefixCache, PrefixCache
from cache.radix import RadixPrefixCache

CacheKind: TypeAlias = Literal["radix", "block", "off"]


def build_prefix_cache(
    kind: CacheKind, page_table: PageTable, max_cached_pages: int | None = None
) -> PrefixCache[Any]:
    """A prefix cache over a page table. `max_cached_pages` limits its size (None: no limit, 0: caches nothing)."""
    match kind:
        case "radix":
            return RadixPrefixCache(page_table, max_cached_pages)
        case "block":
            return BlockManager(page_table, max_cached_pages)
        case "off":
            return NoPrefixCache(page_table)
    raise CacheValueError(f"prefix cache must be one of {', '.join(get_args(CacheKind))}, got {kind!r}")
