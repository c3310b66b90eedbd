"""KV page ownership: a page table, two prefix caches over it, and the allocations of running sequences.

Engines use `KVCacheManager`; the other classes are its parts.  Pure Python and numpy.
"""

from cache.allocation import KVAllocation, KVCacheManager, KVUsage, Published
from cache.block_cache import BlockCache, BlockChain
from cache.blocks import Block, BlockManager, BlockSequence
from cache.errors import (
    CacheError,
    CacheStateError,
    CacheValueError,
    ConservationError,
    DoubleFreeError,
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
from cache.factory import CacheKind, build_prefix_cache
from cache.namespace import CacheNamespace
from cache.page_table import PageTable, ragged_arange
from cache.prefix import CacheStats, InsertResult, MatchResult, NoPrefixCache, Peek, PrefixCache
from cache.radix import RadixPrefixCache
from cache.tokens import CacheToken, CacheTokens, CoordToken, ImageToken, SizeToken, TextToken, as_tokens
from cache.tree import TreeNode

__all__ = [
    "Block",
    "BlockCache",
    "BlockChain",
    "BlockManager",
    "BlockSequence",
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
    "DoubleFreeError",
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
    "as_tokens",
    "build_prefix_cache",
    "ragged_arange",
]
