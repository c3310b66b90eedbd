"""The block cache: chained hashes, shared blocks, misses that end a prefix, and what eviction leaves."""

import numpy as np
import pytest
import xxhash

from petiole.cache import (
    BlockCache,
    CacheNamespace,
    CacheTokens,
    ImageToken,
    KVAllocation,
    KVCacheManager,
    PageSizeError,
    PageTable,
    RadixPrefixCache,
    TextToken,
    UnlockWithoutLockError,
)

SIZE = 16


class Blocks:
    """A table, a block cache, and sequences that are prefilled at once."""

    def __init__(self, n_pages: int = 20, page_size: int = SIZE) -> None:
        self.table = PageTable(n_pages, page_size, 5)
        self.cache = BlockCache(self.table)
        self.manager = KVCacheManager(self.table, self.cache)

    def start(self, tokens: CacheTokens | list[int], namespace: CacheNamespace | None = None) -> KVAllocation:
        tokens = tokens if isinstance(tokens, CacheTokens) else CacheTokens.from_text(tokens)
        kv = self.manager.start(tokens, namespace)
        assert kv is not None
        kv.publish(tokens, tokens.kv_length)
        self.manager.check()
        return kv

    def pages(self, kv: KVAllocation) -> list[int]:
        return self.table.get_pages(kv.row, 0, self.table.page_count(kv.row)).tolist()


def prompt(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def test_the_hash_is_xxhash64_over_the_previous_hash_and_the_tokens() -> None:
    tokens = np.arange(16)
    head = BlockCache.compute_hash(prompt(16))
    assert head == xxhash.xxh64(tokens.tobytes()).intdigest()
    assert (
        BlockCache.compute_hash(prompt(16), head)
        == xxhash.xxh64(head.to_bytes(8, "little") + tokens.tobytes()).intdigest()
    )


def test_full_blocks_are_indexed_and_partial_ones_are_not() -> None:
    blocks = Blocks()
    pages = blocks.pages(blocks.start(prompt(40)))
    first = BlockCache.compute_hash(prompt(16))
    second = BlockCache.compute_hash(prompt(16, 16), first)
    assert blocks.cache.hash_to_block_id == {first: pages[0], second: pages[1]}
    assert len(pages) == 3


def test_an_equal_prefix_is_shared() -> None:
    blocks = Blocks()
    one, two = blocks.start(prompt(40)), blocks.start([*prompt(32), 99])
    assert blocks.pages(two)[:2] == blocks.pages(one)[:2]
    assert (one.reused, two.reused) == (0, 32)
    one.discard()
    assert blocks.cache.evictable_page_count() == 0  # the other one has them locked
    two.discard()
    assert blocks.cache.evictable_page_count() == 2
    blocks.manager.check()


def test_after_a_miss_everything_misses() -> None:
    blocks = Blocks()
    blocks.start(prompt(48))
    assert blocks.start([*prompt(16), *prompt(16, 500), *prompt(16, 32), 7]).reused == 16


def test_the_same_block_behind_another_prefix_is_another_block() -> None:
    blocks = Blocks()
    blocks.start([*prompt(16), *prompt(16, 50), 1])
    assert blocks.start([*prompt(16, 90), *prompt(16, 50), 1]).reused == 0
    assert len(blocks.cache.hash_to_block_id) == 4


def test_a_hash_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petiole.cache.prefix.block_cache._chain", lambda data, prefix: (prefix + 1) % 1000)
    blocks = Blocks()
    one, two = blocks.start(prompt(33)), blocks.start(prompt(33, 700))
    assert (two.reused, two.published) == (0, 0)
    assert set(blocks.pages(one)).isdisjoint(blocks.pages(two))
    assert set(blocks.cache.hash_to_block_id.values()) == set(blocks.pages(one)[:2])  # the hashes stay with it


def test_at_least_one_token_is_computed() -> None:
    blocks = Blocks()
    blocks.start(prompt(32))
    assert blocks.start(prompt(32)).reused == 16


def test_blocks_of_one_token_work_alike() -> None:
    blocks = Blocks(page_size=1)
    blocks.start(prompt(4))
    assert blocks.start(prompt(5)).reused == 4


def test_blocks_that_fill_up_while_decoding_are_matched_by_the_next_turn() -> None:
    blocks, tokens = Blocks(), CacheTokens.from_text(prompt(31))
    kv = blocks.start(tokens)
    for token in range(31, 40):
        tokens.append(token)
        assert kv.reserve(tokens.kv_length)
    kv.finish(tokens, 39)
    assert blocks.start(prompt(50)).reused == 32


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    blocks = Blocks(n_pages=5)  # four usable
    one = blocks.start(prompt(48))
    assert not blocks.manager.can_start(prompt(32, 500))
    one.discard()
    assert blocks.start(prompt(32, 500)).reused == 0
    assert blocks.cache.peek(prompt(48)).kv_length == 32


def test_namespaces_do_not_share() -> None:
    blocks, lora = Blocks(), CacheNamespace(lora_id=1)
    blocks.start(prompt(40))
    assert blocks.start(prompt(40), lora).reused == 0
    assert blocks.cache.peek(prompt(32), lora).kv_length == 32


def test_a_match_never_ends_inside_an_image() -> None:
    blocks = Blocks()
    tokens = [*map(TextToken, prompt(10)), ImageToken(5, 30), *map(TextToken, prompt(10))]
    blocks.start(CacheTokens.from_tokens(tokens))
    assert blocks.start(CacheTokens.from_tokens([*tokens[:2], *map(TextToken, prompt(60, 900))])).reused == 0
    assert blocks.cache.peek([*tokens, TextToken(1)]).kv_length == 48
    behind = [*tokens[:11], *map(TextToken, prompt(8, 70))]  # 40 positions end in block 2
    assert blocks.cache.peek(behind).kv_length == 0


@pytest.mark.parametrize("size", [2, 8, 24])
def test_page_sizes_that_kernels_cannot_use_are_refused(size: int) -> None:
    with pytest.raises(PageSizeError, match=f"got {size}"):
        BlockCache(PageTable(10, size))


def test_the_radix_cache_wants_pages_of_one() -> None:
    with pytest.raises(PageSizeError, match="got 16"):
        RadixPrefixCache(PageTable(10, 16))


def test_unlocking_what_is_not_locked_is_refused() -> None:
    blocks = Blocks()
    blocks.start(prompt(20)).discard()
    with pytest.raises(UnlockWithoutLockError):
        blocks.cache.unlock(blocks.cache.match_prefix(prompt(16)).last_node)
    blocks.manager.check()
