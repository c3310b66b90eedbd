"""KV page ownership: a page table, two prefix caches over it, and the allocations of running sequences.

Engines use `KVCacheManager`, by the names of this package; the rooms are its parts. Pure Python and numpy. Each
line may import what stands below it.

    allocation  the KV of running sequences: takes and releases locks, rows and pages
    prefix/     the prefix caches: which cached pages a prompt can use again
    pages/      the page pool and the page table: who owns a page, which row maps it
    namespace   the inputs besides tokens on which KV depends
    tokens      cache tokens: the identity of the input at a position
    errors      what a caller's mistake or a broken invariant raises
"""

from petiole import _alias
from petiole.cache.allocation import KVAllocation, KVCacheManager, KVUsage, Published
from petiole.cache.errors import (
    CacheError,
    CacheStateError,
    CacheValueError,
    ConservationError,
    EvictionError,
    MappingError,
    MisalignedError,
    OutOfPagesError,
    OutOfRowsError,
    OwnershipError,
    PageSizeError,
    ReleasedError,
    RowError,
    StaleNodeError,
    TokenError,
    UnlockWithoutLockError,
)
from petiole.cache.namespace import CacheNamespace
from petiole.cache.pages.page_table import PageTable, ragged_arange
from petiole.cache.prefix.block_cache import BlockCache, BlockChain
from petiole.cache.prefix.factory import CacheKind, build_prefix_cache
from petiole.cache.prefix.interface import (
    CacheStats,
    InsertResult,
    MatchResult,
    NoPrefixCache,
    Peek,
    PrefixCache,
)
from petiole.cache.prefix.radix import RadixPrefixCache
from petiole.cache.prefix.tree import TreeNode
from petiole.cache.tokens import (
    CacheToken,
    CacheTokens,
    CoordToken,
    ImageToken,
    SizeToken,
    TextToken,
    ValueToken,
    as_tokens,
)

__all__ = [
    "BlockCache",
    "BlockChain",
    "CacheError",
    "CacheKind",
    "CacheNamespace",
    "CacheStateError",
    "CacheStats",
    "CacheToken",
    "CacheTokens",
    "CacheValueError",
    "ConservationError",
    "CoordToken",
    "EvictionError",
    "ImageToken",
    "InsertResult",
    "KVAllocation",
    "KVCacheManager",
    "KVUsage",
    "MappingError",
    "MatchResult",
    "MisalignedError",
    "NoPrefixCache",
    "OutOfPagesError",
    "OutOfRowsError",
    "OwnershipError",
    "PageSizeError",
    "PageTable",
    "Peek",
    "PrefixCache",
    "Published",
    "RadixPrefixCache",
    "ReleasedError",
    "RowError",
    "SizeToken",
    "StaleNodeError",
    "TextToken",
    "TokenError",
    "TreeNode",
    "UnlockWithoutLockError",
    "ValueToken",
    "as_tokens",
    "build_prefix_cache",
    "ragged_arange",
]

_alias.claim(__name__)
