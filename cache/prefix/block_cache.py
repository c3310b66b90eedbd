"""A prefix cache of full blocks, indexed by chained hashes. A block is one page.

The hash of a block covers its tokens and the hash of the block before it. So one dictionary from hash to page
finds whole prefixes, and a block matches only after the same prefix. Block metadata is stored in arrays indexed
by page, so locking or verifying a chain takes a few array operations.

xxhash64 is fast but not safe against an adversary. Therefore a hit also requires equal tokens, the same parent
block and (for the first block) the same namespace; by induction, the whole prefix is then equal.

Invariants (verified by `check`):

B1  every indexed block is in the hash table under its own hash, and its parent is indexed
B2  a lock on a chain locks each of its blocks, so all blocks that follow an unlocked block are unlocked
B3  `evictable_page_count` is the number of unlocked indexed blocks
B4  every unlocked indexed block without children is in the eviction heap
B5  a block that is owned but not indexed (flushed, or withdrawn while in use) is locked; the last unlock frees it

Valid page sizes are 1 and the multiples of 16, as the kernels require.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import ArrayLike

from petiole.cache.exceptions import (
    ConservationError,
    MisalignedError,
    PageSizeError,
    StaleNodeError,
    UnlockWithoutLockError,
)
from petiole.cache.namespace import DEFAULT_NAMESPACE, CacheNamespace
from petiole.cache.pages.page_pool import PagePool, Pages
from petiole.cache.prefix.accounting import CountingCache
from petiole.cache.prefix.interface import NO_PAGES, InsertResult, MatchResult, Peek
from petiole.cache.tokens import CacheTokens, Codes, ImageIdentity, TokensLike, as_tokens, page_boundary

_NONE, _INDEXED, _DETACHED = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class BlockChain:
    """A cached prefix: its blocks from the start of the sequence, and the hash of the last one."""

    pages: Pages
    hash: int
    namespace: CacheNamespace


class BlockCache(CountingCache[int, Pages]):
    """Prefix cache over hashed blocks. `max_cached_pages` limits its size (None: no limit, 0: caches nothing)."""

    def __init__(self, page_table: PagePool, max_cached_pages: int | None = None) -> None:
        size = page_table.page_size
        if size != 1 and size % 16:
            raise PageSizeError(f"the block cache needs page_size 1 or a multiple of 16, got {size}")
        self._accessed = np.zeros(page_table.n_pages, dtype=np.int64)
        self._tokens = np.empty((page_table.n_pages, size), dtype=np.int64)
        super().__init__(page_table, max_cached_pages, self._accessed.item)
        self.block_size = size

    def reset(self) -> None:
        super().reset()
        self.hash_to_block_id: dict[int, int] = {}
        n = self.page_table.n_pages
        self._hashes = np.zeros(n, dtype=np.uint64)
        self._parents = np.zeros(n, dtype=np.int64)  # 0: the first block of a sequence
        self._refs = np.zeros(n, dtype=np.int32)  # lock counts
        self._children = np.zeros(n, dtype=np.int32)  # number of indexed blocks whose parent is this one
        self._state = np.zeros(n, dtype=np.int8)
        self._namespaces: dict[int, CacheNamespace] = {}  # by first block
        self._images: dict[int, tuple[ImageIdentity, ...]] = {}  # keeps image serials alive

    @property
    def node_count(self) -> int:
        return self._cached

    @classmethod
    def compute_hash(cls, token_ids: ArrayLike, prefix: int = -1) -> int:
        """xxhash64 over the previous block's hash (none if -1) and the block's int64 tokens."""
        return _chain(np.asarray(token_ids, dtype=np.int64).tobytes(), prefix)

    # ------------------------------------------------------------ lookup

    def peek(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Peek:
        pages, _ = self._find(as_tokens(tokens), namespace or DEFAULT_NAMESPACE)
        return Peek(len(pages) * self.block_size, int(np.count_nonzero(self._refs[pages] == 0)))

    def find(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Pages:
        return self._find(as_tokens(tokens), namespace or DEFAULT_NAMESPACE)[0]

    def match_prefix(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> MatchResult[BlockChain]:
        tokens, namespace = as_tokens(tokens), namespace or DEFAULT_NAMESPACE
        pages, last = self._find(tokens, namespace)
        kv = len(pages) * self.block_size
        self.stats.record_lookup(kv, tokens.kv_length, len(pages))
        if kv == 0:
            return MatchResult(NO_PAGES, 0, 0, None)
        self._touch(pages)
        return MatchResult(pages, kv, tokens.token_index(kv), BlockChain(pages, last, namespace))

    def _find(self, tokens: CacheTokens, namespace: CacheNamespace) -> tuple[Pages, int]:
        """The blocks of the longest cached prefix that splits no image, and the hash of the last one (or -1)."""
        codes = tokens.codes
        pages, hashes = self._follow(codes, namespace, NO_PAGES, _seed(namespace))
        if len(pages) and tokens.images:
            pages = pages[: page_boundary(codes, len(pages) * self.block_size, self.block_size) // self.block_size]
        return pages, hashes[len(pages) - 1] if len(pages) else -1

    def _follow(
        self, codes: Codes, namespace: CacheNamespace, before: Pages, prefix: int
    ) -> tuple[Pages, list[int]]:
        """The indexed blocks that continue the chain `before`, up to the first miss, and their hashes."""
        first, size, table = len(before), self.block_size, self.hash_to_block_id
        data, width = codes[first * size :].tobytes(), size * 8
        hits: list[int] = []
        hashes: list[int] = []
        for start in range(0, len(data) - width + 1, width):
            prefix = _chain(data[start : start + width], prefix)
            page = table.get(prefix)
            if page is None:
                break
            hits.append(page)
            hashes.append(prefix)
        if not hits:
            return NO_PAGES, hashes
        pages = np.array(hits, dtype=np.int64)
        parents = np.concatenate([_last(before), pages[:-1]])
        wanted = codes[first * size : (first + len(pages)) * size].reshape(-1, size)
        same = (self._tokens[pages] == wanted).all(axis=1) & (self._parents[pages] == parents)
        if not first and self._namespaces.get(hits[0]) != namespace:
            same[0] = False
        if not same.all():  # hash collision: this block and all later ones are misses
            pages = pages[: int(same.argmin())]
        return pages, hashes[: len(pages)]

    # ------------------------------------------------------------ insertion

    def insert(
        self,
        tokens: TokensLike,
        pages: ArrayLike,
        namespace: CacheNamespace | None = None,
        from_node: BlockChain | None = None,
        from_token_idx: int = 0,
        from_page_idx: int = 0,
        move_lock: bool = False,
    ) -> InsertResult[BlockChain]:
        tokens, given, size = as_tokens(tokens), np.asarray(pages, dtype=np.int64), self.block_size
        if given.shape != (self.page_table.pages_for(tokens.kv_length),):
            raise MisalignedError(f"{tokens} needs pages of {size} positions, got {given.size}")
        chain = from_node or BlockChain(
            NO_PAGES, _seed(namespace or DEFAULT_NAMESPACE), namespace or DEFAULT_NAMESPACE
        )
        if len(chain.pages) != from_page_idx or tokens.token_index(from_page_idx * size) != from_token_idx:
            raise MisalignedError(f"from_node does not end at page {from_page_idx}, token {from_token_idx}")
        if from_node is not None and not self.is_attached(from_node):
            raise StaleNodeError("from_node is not in the cache any more: lock what you keep")
        full = page_boundary(tokens.codes, tokens.kv_length, size)
        codes = tokens.codes[:full]
        found, hashes = self._follow(codes, chain.namespace, chain.pages, chain.hash)
        if len(found):
            chain = BlockChain(np.concatenate([chain.pages, found]), hashes[-1], chain.namespace)
        start = len(chain.pages)
        hashes = self._continuation(chain, codes)
        end = start + len(hashes)
        pages = np.concatenate([chain.pages, given[start:end]])
        extended = BlockChain(pages, hashes[-1], chain.namespace) if hashes else chain
        result = InsertResult(extended if end else None, end - start, start * size, end * size)
        self._touch(pages)
        if hashes:
            self._adopt(extended, start, codes, hashes, tokens.images)
        if move_lock:
            refs = self._refs[pages[from_page_idx:]]
            self._reclaimable -= int(np.count_nonzero(refs == 0))
            self._refs[pages[from_page_idx:]] = refs + 1
        elif hashes:
            self._heap.push(int(pages[-1]))
        return result

    def _continuation(self, chain: BlockChain, codes: Codes) -> list[int]:
        """The hashes of new blocks after a chain, up to the size limit or the first hash collision."""
        start, size = len(chain.pages), self.block_size
        prefix, hashes = chain.hash, list[int]()
        for i in range(start, start + self._make_room(len(codes) // size - start, chain.pages)):
            prefix = _chain(codes[i * size : (i + 1) * size].tobytes(), prefix)
            if prefix in self.hash_to_block_id:
                break
            hashes.append(prefix)
        return hashes

    def _adopt(
        self,
        chain: BlockChain,
        start: int,
        codes: Codes,
        hashes: list[int],
        images: tuple[ImageIdentity, ...],
    ) -> None:
        """Index the blocks of a chain from block `start` on, and take over their pages."""
        end, size = len(chain.pages), self.block_size
        new, parents = chain.pages[start:], np.concatenate([np.zeros(1, np.int64), chain.pages])[start:end]
        hashed, blocks = np.array(hashes, dtype=np.uint64), codes[start * size : end * size].reshape(-1, size)
        self.page_table.adopt_pages(new)  # from here on nothing fails: nobody would own the pages
        self._tokens[new] = blocks
        self._hashes[new] = hashed
        self._parents[new] = parents
        self._children[new] = 0
        self._children[parents] += 1
        self._children[0] = 0
        self._refs[new] = 0
        self._state[new] = _INDEXED
        self.hash_to_block_id.update(zip(hashes, new.tolist(), strict=True))
        if start == 0:
            self._namespaces[int(new[0])] = chain.namespace
        if images:
            self._images.update(dict.fromkeys(new.tolist(), images))
        self._cached += len(new)
        self._reclaimable += len(new)
        self.stats.inserted_pages += len(new)

    # ------------------------------------------------------------ locks

    def is_attached(self, node: BlockChain) -> bool:
        last = node.pages[-1:]
        return bool(
            (self._state[node.pages] == _INDEXED).all() and (self._hashes[last] == np.uint64(node.hash)).all()
        )

    def pages_of(self, node: BlockChain) -> Pages:
        return node.pages

    def lock(self, node: BlockChain | None) -> None:
        if node is None:
            return
        if not self.is_attached(node):
            raise StaleNodeError("cannot lock blocks that have left the cache: lock what you keep")
        self._pin(node.pages)

    def unlock(self, node: BlockChain | None) -> None:
        if node is None:
            return
        if int(self._refs[node.pages].min()) < 1:
            raise UnlockWithoutLockError(f"a block of this chain of {len(node.pages)} is not locked")
        self._unpin(node.pages)

    def _pin(self, pages: Pages) -> None:
        refs = self._refs[pages]
        self._reclaimable -= int(np.count_nonzero((refs == 0) & (self._state[pages] == _INDEXED)))
        self._refs[pages] = refs + 1

    def _unpin(self, pages: Pages) -> None:
        refs = self._refs[pages] - 1
        self._refs[pages] = refs
        unlocked = pages[refs == 0]
        indexed = self._state[unlocked] == _INDEXED
        self._reclaimable += int(np.count_nonzero(indexed))
        for page in unlocked[indexed & (self._children[unlocked] == 0)].tolist():
            self._heap.push(page)
        if not indexed.all():
            self._free_detached(unlocked[~indexed])

    # ------------------------------------------------------------ eviction

    def _take_oldest(self, needed_pages: int) -> tuple[Pages, int]:
        """Remove exactly `needed_pages`; a block is evicted only after its children."""
        evicted: list[int] = []
        while len(evicted) < needed_pages:
            page = self._heap.pop()
            assert page is not None, "B4: evictable blocks, but none in the heap"
            if self._refs[page] or self._children[page]:
                continue
            evicted.append(page)
            parent = self._unindex(page)
            if parent and not self._children[parent] and not self._refs[parent]:
                self._heap.push(parent)
        self._state[evicted] = _NONE
        self._cached -= len(evicted)
        self._reclaimable -= len(evicted)
        return np.array(evicted, dtype=np.int64), len(evicted)

    def _unindex(self, page: int) -> int:
        """Remove a block from the hash table. Returns its parent, or 0."""
        del self.hash_to_block_id[self._hashes.item(page)]
        self._images.pop(page, None)
        parent = self._parents.item(page)
        if parent:
            self._children[parent] -= 1
        else:
            self._namespaces.pop(page, None)
        return parent

    # ------------------------------------------------------------ withdrawal and flush

    def withdraw(
        self, node: BlockChain, keep_kv: int, pages: Pages, batch_idx: int
    ) -> tuple[BlockChain | None, int] | None:
        keep = keep_kv // self.block_size
        mine = node.pages[keep:] == pages[keep:]
        first = keep + int(mine.argmax()) if mine.any() else len(pages)
        own = node.pages[first:]
        branches = self._children[own]
        branches[:-1] -= 1
        if not (mine[first - keep :].all() and (self._refs[own] == 1).all() and not branches.any()):
            self._detach(own)
            return None
        for page in own.tolist():
            self._heap.discard(page)
            self._unindex(page)
        self._state[own] = _NONE
        self._refs[own] = 0
        self._cached -= len(own)
        self.page_table.disown_pages(own, batch_idx)
        self.stats.inserted_pages -= len(own)
        self._unpin(node.pages[keep:first])
        kept = node.pages[:keep]  # the caller's lock remains on these
        if keep == 0:
            return None, 0
        return BlockChain(kept, self._hashes.item(int(kept[-1])), node.namespace), keep * self.block_size

    def flush(self) -> int:
        before = self._cached
        self._detach(self._indexed())
        return before - self._cached

    def _detach(self, blocks: Pages) -> None:
        """Make blocks and their descendants unmatchable, and free the unlocked ones."""
        reached = np.zeros(self.page_table.n_pages, dtype=np.bool_)
        indexed = self._indexed()
        frontier = blocks
        while len(frontier):
            reached[frontier] = True
            frontier = indexed[reached[self._parents[indexed]] & ~reached[indexed]]
        detached = np.flatnonzero(reached)
        for page in detached.tolist():
            self._heap.discard(page)
            self._unindex(page)
        unlocked = detached[self._refs[detached] == 0]
        self._state[detached] = _DETACHED
        self._reclaimable -= len(unlocked)
        self._free_detached(unlocked)

    def _free_detached(self, pages: Pages) -> None:
        self._state[pages] = _NONE
        self._cached -= len(pages)
        self.page_table.release_pages(pages)

    def _indexed(self) -> Pages:
        return np.flatnonzero(self._state == _INDEXED)

    def _touch(self, pages: Pages) -> None:
        self._accessed[pages] = self._tick()

    # ------------------------------------------------------------ conservation

    def keep_only(self, nodes: Iterable[BlockChain]) -> None:
        chains = list(nodes)
        hashes, parents, images = self._hashes, self._parents, self._images
        self.reset()
        for chain in chains:
            self._refs[chain.pages] += 1
            self._namespaces[int(chain.pages[0])] = chain.namespace
        kept = np.flatnonzero(self._refs)
        self._state[kept], self._hashes[kept], self._parents[kept] = _INDEXED, hashes[kept], parents[kept]
        np.add.at(self._children, parents[kept], 1)
        self._children[0] = 0
        self.hash_to_block_id.update(zip(hashes[kept].tolist(), kept.tolist(), strict=True))
        self._images.update((page, images[page]) for page in kept.tolist() if page in images)
        self._cached = len(kept)

    def owned_pages(self) -> Pages:
        return np.flatnonzero(self._state != _NONE)

    def check(self) -> None:
        indexed = self._indexed()
        free_to_go = indexed[self._refs[indexed] == 0]
        self._agree(
            {
                "cached blocks": (self._cached, int(np.count_nonzero(self._state))),
                "reclaimable blocks (B3)": (self._reclaimable, len(free_to_go)),
                "hashed blocks (B1)": (len(self.hash_to_block_id), len(indexed)),
            }
        )
        children, held_below = np.zeros_like(self._children), np.zeros_like(self._refs)
        np.add.at(children, self._parents[indexed], 1)
        np.add.at(held_below, self._parents[indexed], self._refs[indexed])
        children[0] = held_below[0] = 0
        if (children[indexed] != self._children[indexed]).any() or (held_below > self._refs).any():
            raise ConservationError("blocks do not know their children or are not held with them (B2)")
        for page in indexed.tolist():
            self._check_block(page)
        if any(page not in self._heap for page in free_to_go[children[free_to_go] == 0].tolist()):
            raise ConservationError("a block could be evicted and is not in the eviction heap (B4)")
        if (self._refs[self._state == _DETACHED] < 1).any():
            raise ConservationError("a block is detached, yet nobody holds it (B5)")

    def check_locks(self, nodes: Iterable[BlockChain]) -> None:
        held = np.zeros_like(self._refs)
        for node in nodes:
            held[node.pages] += 1
        if (held != self._refs).any():
            page = int((held != self._refs).argmax())
            raise ConservationError(f"block {page} has {self._refs[page]} locks, and {held[page]} rows hold it")

    def _check_block(self, page: int) -> None:
        parent = self._parents.item(page)
        if parent and self._state[parent] != _INDEXED:
            raise ConservationError(f"the parent of block {page} is not indexed (B1)")
        prefix = self._hashes.item(parent) if parent else _seed(self._namespaces[page])
        value = self.compute_hash(self._tokens[page], prefix)
        if value != self._hashes.item(page) or self.hash_to_block_id.get(value) != page:
            raise ConservationError(f"block {page} is not filed under the hash of its content (B1)")


def _chain(data: bytes, prefix: int) -> int:
    return xxhash.xxh64_intdigest(data if prefix == -1 else prefix.to_bytes(8, "little") + data)


def _seed(namespace: CacheNamespace) -> int:
    """The initial hash of a namespace's chains; -1 (no prefix) for the default namespace."""
    return -1 if namespace == DEFAULT_NAMESPACE else xxhash.xxh64_intdigest(repr(namespace).encode())


def _last(pages: Pages) -> Pages:
    """The parent of the block that follows these, as int64 [1]; 0 if there are none."""
    return pages[-1:] if len(pages) else np.zeros(1, dtype=np.int64)
