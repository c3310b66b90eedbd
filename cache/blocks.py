"""A block manager for sequences with block tables, on top of the hashed block cache.

`BlockManager` adds the usual block manager interface to `BlockCache`, for engines whose sequences have a
`block_table`: `allocate` at admission, `may_append` before each decode step, `deallocate` at the end or at
preemption.  Petiole's own engine uses the cache through `KVCacheManager`.

Full blocks are indexed when they are allocated or filled, so the next equal prompt can reuse them.  After the
first block that misses, all later blocks of the sequence miss.  At least one token is always left to compute.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from cache.block_cache import BlockCache, BlockChain
from cache.errors import CacheStateError, MisalignedError
from cache.namespace import CacheNamespace
from cache.pool import UNBOUND, PagePool
from cache.tokens import CacheTokens, TokensLike, as_tokens, page_boundary, reuse_limit


@runtime_checkable
class BlockSequence(Protocol):
    """The attributes of a sequence that the block manager uses. A `namespace` attribute is optional."""

    token_ids: TokensLike
    block_table: list[int]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """A snapshot of one block; `hash` is -1 unless the block is full and indexed."""

    block_id: int
    ref_count: int
    hash: int
    token_ids: list[int]


class BlockManager(BlockCache):
    """A `BlockCache` that also maintains the block tables of sequences."""

    def __init__(
        self,
        page_table: PagePool,
        max_cached_pages: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        super().__init__(page_table, max_cached_pages if enable_prefix_caching else 0)
        self._running: dict[int, tuple[BlockSequence, BlockChain | None]] = {}  # by id(sequence)

    def block(self, block_id: int) -> Block:
        """A snapshot of one block."""
        if not 0 < block_id < self.page_table.n_pages:
            raise MisalignedError(f"block id must be in 1..{self.page_table.n_pages - 1}, got {block_id}")
        owner = self.page_table.owner(block_id)
        if self.hash_to_block_id.get(self._hashes.item(block_id)) == block_id:
            return Block(
                block_id, int(self._refs[block_id]), self._hashes.item(block_id), self._tokens[block_id].tolist()
            )
        return Block(block_id, int(self._refs[block_id]) + (owner >= UNBOUND), -1, [])

    def can_allocate(self, seq: BlockSequence) -> bool:
        """Whether `allocate` would succeed, taking cached blocks into account."""
        tokens = self._tokens_of(seq)
        cached = self.peek(self._reusable(tokens), _namespace(seq))
        new_pages = self.page_table.pages_for(tokens.kv_length) - cached.kv_length // self.block_size
        return new_pages <= self.page_table.pages_available + self._reclaimable - cached.reclaimable_pages

    def allocate(self, seq: BlockSequence) -> None:
        """Fill a sequence's block table with its cached prefix, then free blocks, and index the full blocks."""
        if seq.block_table or id(seq) in self._running:
            raise CacheStateError(f"the sequence already has {len(seq.block_table)} blocks")
        tokens = self._tokens_of(seq)
        match = self.match_prefix(self._reusable(tokens), _namespace(seq))
        self.lock(match.last_node)
        try:
            fresh = self.page_table.allocate_pages(
                self.page_table.pages_for(tokens.kv_length) - len(match.matched_pages)
            )
        except BaseException:
            self.unlock(match.last_node)
            raise
        seq.block_table.extend([*match.matched_pages.tolist(), *fresh.tolist()])
        seq.num_cached_tokens = match.matched_kv_length
        self._running[id(seq)] = (seq, match.last_node)
        self._index_full(seq, tokens, tokens.kv_length)

    def deallocate(self, seq: BlockSequence) -> None:
        """Release a sequence's blocks. Shared blocks stay with their other users, indexed blocks stay cached."""
        chain = self._chain_of(seq)
        table = np.array(seq.block_table, dtype=np.int64)
        private = table[self.page_table.owns(UNBOUND, table)]
        del self._running[id(seq)]
        self.unlock(chain)
        self.page_table.free_pages_to_pool(private[::-1])
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def can_append(self, seq: BlockSequence) -> bool:
        """Whether blocks suffice for the tokens that the block table does not cover yet."""
        return self._missing(seq) <= self.page_table.pages_available + self._reclaimable

    def may_append(self, seq: BlockSequence, num_new_tokens: int = 1) -> None:
        """Extend the block table to the sequence's length, and index the blocks that are full.

        The last `num_new_tokens - 1` tokens are draft placeholders; blocks that contain them are not indexed yet.
        """
        if num_new_tokens < 1:
            raise MisalignedError(f"num_new_tokens must be at least 1, got {num_new_tokens}")
        self._chain_of(seq)
        seq.block_table.extend(self.page_table.allocate_pages(max(self._missing(seq), 0)).tolist())
        tokens = self._tokens_of(seq)
        self._index_full(seq, tokens, tokens.kv_length - (num_new_tokens - 1))

    def _missing(self, seq: BlockSequence) -> int:
        return self.page_table.pages_for(self._tokens_of(seq).kv_length) - len(seq.block_table)

    def _index_full(self, seq: BlockSequence, tokens: CacheTokens, known: int) -> None:
        chain = self._chain_of(seq)
        done = len(chain.pages) if chain else 0
        full = page_boundary(tokens.codes, max(known, 0), self.block_size) // self.block_size
        if full <= done:
            return
        pages = np.array(seq.block_table[:full], dtype=np.int64)
        known_tokens = tokens.prefix(full * self.block_size)
        result = self.insert(
            known_tokens, pages, _namespace(seq), chain, known_tokens.token_index(done * self.block_size), done
        )
        self.lock(result.node)
        self.unlock(chain)
        self._running[id(seq)] = (seq, result.node)

    def _chain_of(self, seq: BlockSequence) -> BlockChain | None:
        if id(seq) not in self._running:
            raise CacheStateError("the sequence has no blocks here: allocate first")
        return self._running[id(seq)][1]

    def _reusable(self, tokens: CacheTokens) -> CacheTokens:
        """The tokens that may be reused from the cache: at least one is left to compute."""
        return tokens.prefix(reuse_limit(tokens.codes, self.block_size))

    @staticmethod
    def _tokens_of(seq: BlockSequence) -> CacheTokens:
        tokens = as_tokens(seq.token_ids)
        if tokens.kv_length == 0:
            raise MisalignedError("a sequence needs at least one token")
        return tokens


def _namespace(seq: BlockSequence) -> CacheNamespace | None:
    namespace: CacheNamespace | None = getattr(seq, "namespace", None)
    return namespace
