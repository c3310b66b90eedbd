"""The choice between the caches: by name, from configuration."""

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
    """The prefix cache of that name over a table; `max_cached_pages` None is all free memory, 0 no reuse."""
    match kind:
        case "radix":
            return RadixPrefixCache(page_table, max_cached_pages)
        case "block":
            return BlockManager(page_table, max_cached_pages)
        case "off":
            return NoPrefixCache(page_table)
    raise CacheValueError(f"prefix cache must be one of {', '.join(get_args(CacheKind))}, got {kind!r}")
