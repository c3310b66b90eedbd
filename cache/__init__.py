"""KV page ownership: a page table, two prefix caches over it, and the allocations of running sequences.

Engines use `KVCacheManager`, by the names of this package; the rooms are its parts. Pure Python and numpy. Each
line may import what stands below it.

    groups/     layers that see a window or keep a state: pools of their own, and where a match may end
    allocation  the KV of running sequences: takes and releases locks, rows and pages
    prefix/     the prefix caches: which cached pages a prompt can use again
    pages/      the page pool and the page table: who owns a page, which row maps it
    namespace   the inputs besides tokens on which KV depends
    tokens      cache tokens: the identity of the input at a position
    exceptions  what a caller's mistake or a broken invariant raises
"""

from petiole import _alias
from petiole.cache.allocation import GroupUsage, KVAllocation, KVCacheManager, KVUsage, Published, StateUsage
from petiole.cache.exceptions import (
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
from petiole.cache.groups.manager import GroupedManager, build_manager
from petiole.cache.groups.recurrent_states import Snapshots, StateGroup
from petiole.cache.groups.table import GroupedTable, WindowPages
from petiole.cache.groups.windows import most_pages
from petiole.cache.namespace import CacheNamespace
from petiole.cache.pages.amounts import Amount, PageCounts
from petiole.cache.pages.page_table import PageTable, ragged_arange
from petiole.cache.prefix.accounting import CacheStats
from petiole.cache.prefix.block_cache import BlockCache, BlockChain
from petiole.cache.prefix.factory import CacheKind, build_prefix_cache
from petiole.cache.prefix.interface import InsertResult, MatchResult, NoPrefixCache, Peek, PrefixCache
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
    "Amount",
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
    "GroupUsage",
    "GroupedManager",
    "GroupedTable",
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
    "PageCounts",
    "PageSizeError",
    "PageTable",
    "Peek",
    "PrefixCache",
    "Published",
    "RadixPrefixCache",
    "ReleasedError",
    "RowError",
    "SizeToken",
    "Snapshots",
    "StaleNodeError",
    "StateGroup",
    "StateUsage",
    "TextToken",
    "TokenError",
    "TreeNode",
    "UnlockWithoutLockError",
    "ValueToken",
    "WindowPages",
    "as_tokens",
    "build_manager",
    "build_prefix_cache",
    "most_pages",
    "ragged_arange",
]

_alias.claim(__name__)
