"""The block manager: hash chains, hits, sticky misses, blocks that fill up while decoding, shared references."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from cache import (
    BlockManager,
    CacheNamespace,
    CacheStateError,
    ImageToken,
    OutOfPagesError,
    PageSizeError,
    PageTable,
    RadixPrefixCache,
    TextToken,
    UnlockWithoutLockError,
)

SIZE = 16


@dataclass(eq=False)
class Seq:
    token_ids: list
    namespace: CacheNamespace | None = None
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


def manager(n_pages: int = 20, page_size: int = SIZE, **options) -> BlockManager:
    blocks = BlockManager(PageTable(n_pages, page_size, 4), **options)
    blocks.page_table.set_prefix_cache(blocks)
    return blocks


def settle(blocks: BlockManager) -> None:
    blocks.check()
    blocks.page_table.check()


def prompt(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def test_the_hash_is_xxhash64_over_the_previous_hash_and_the_tokens() -> None:
    tokens = np.arange(16)
    head = BlockManager.compute_hash(prompt(16))
    assert head == xxhash.xxh64(tokens.tobytes()).intdigest()
    assert (
        BlockManager.compute_hash(prompt(16), head)
        == xxhash.xxh64(head.to_bytes(8, "little") + tokens.tobytes()).intdigest()
    )


def test_full_blocks_are_indexed_at_allocation_and_partial_ones_are_not() -> None:
    blocks, seq = manager(), Seq(prompt(40))
    blocks.allocate(seq)
    assert len(seq.block_table) == 3
    first, second, third = (blocks.block(i) for i in seq.block_table)
    assert first.hash == BlockManager.compute_hash(prompt(16))
    assert second.hash == BlockManager.compute_hash(prompt(16, 16), first.hash)
    assert (third.hash, third.token_ids, third.ref_count) == (-1, [], 1)
    assert first.token_ids == prompt(16)
    settle(blocks)


def test_an_equal_prefix_is_shared_and_counted() -> None:
    blocks, one, two = manager(), Seq(prompt(40)), Seq([*prompt(32), 99])
    blocks.allocate(one)
    blocks.allocate(two)
    assert two.block_table[:2] == one.block_table[:2]
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 32)
    assert [blocks.block(i).ref_count for i in two.block_table] == [2, 2, 1]
    blocks.deallocate(one)
    assert [blocks.block(i).ref_count for i in two.block_table] == [1, 1, 1]
    settle(blocks)


def test_after_a_miss_everything_misses() -> None:
    blocks = manager()
    blocks.allocate(Seq(prompt(48)))
    seq = Seq([*prompt(16), *prompt(16, 500), *prompt(16, 32), 7])
    blocks.allocate(seq)
    assert seq.num_cached_tokens == 16


def test_the_same_block_behind_another_prefix_is_another_block() -> None:
    blocks, one, two = (
        manager(),
        Seq([*prompt(16), *prompt(16, 50), 1]),
        Seq([*prompt(16, 90), *prompt(16, 50), 1]),
    )
    blocks.allocate(one)
    blocks.allocate(two)
    assert two.num_cached_tokens == 0
    assert blocks.block(one.block_table[1]).token_ids == blocks.block(two.block_table[1]).token_ids
    assert blocks.block(one.block_table[1]).hash != blocks.block(two.block_table[1]).hash


def test_a_hash_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.block_cache._chain", lambda data, prefix: (prefix + 1) % 1000)
    blocks, one, two = manager(), Seq(prompt(33)), Seq(prompt(33, 700))
    blocks.allocate(one)
    blocks.allocate(two)
    assert two.num_cached_tokens == 0
    assert set(one.block_table).isdisjoint(two.block_table)
    assert [blocks.block(i).hash for i in two.block_table] == [-1, -1, -1]  # the hash stays with the first
    blocks.deallocate(two)
    blocks.page_table.check()


def test_at_least_one_token_is_computed() -> None:
    blocks = manager()
    blocks.allocate(Seq(prompt(32)))
    seq = Seq(prompt(32))
    blocks.allocate(seq)
    assert seq.num_cached_tokens == 16
    settle(blocks)


def test_a_block_that_fills_up_while_decoding_is_indexed() -> None:
    blocks, seq = manager(), Seq(prompt(31))
    blocks.allocate(seq)
    assert blocks.block(seq.block_table[1]).hash == -1
    seq.token_ids.append(31)
    assert blocks.can_append(seq)
    blocks.may_append(seq)
    head = blocks.block(seq.block_table[0]).hash
    assert blocks.block(seq.block_table[1]).hash == BlockManager.compute_hash(prompt(16, 16), head)
    assert len(seq.block_table) == 2
    seq.token_ids.append(32)
    blocks.may_append(seq)
    assert len(seq.block_table) == 3
    settle(blocks)


def test_blocks_that_reach_into_draft_tokens_wait() -> None:
    blocks, seq = manager(), Seq(prompt(30))
    blocks.allocate(seq)
    seq.token_ids += [77, 78]
    blocks.may_append(seq, num_new_tokens=2)
    assert blocks.block(seq.block_table[1]).hash == -1
    seq.token_ids[-1] = 79  # the draft was rejected
    blocks.may_append(seq)
    assert blocks.block(seq.block_table[1]).token_ids == [*prompt(14, 16), 77, 79]


def test_blocks_of_one_token_work_alike() -> None:
    blocks, one, two = manager(page_size=1), Seq(prompt(4)), Seq(prompt(5))
    blocks.allocate(one)
    blocks.allocate(two)
    assert two.num_cached_tokens == 4
    one.token_ids.append(9)
    blocks.may_append(one)
    assert blocks.block(one.block_table[-1]).token_ids == [9]
    settle(blocks)


def test_admission_counts_what_is_cached_and_what_can_be_evicted() -> None:
    blocks = manager(n_pages=5)  # four usable
    one = Seq(prompt(48))
    blocks.allocate(one)
    assert blocks.can_allocate(Seq([*prompt(48), 1]))  # three shared, one fresh
    assert not blocks.can_allocate(Seq(prompt(32, 500)))
    with pytest.raises(OutOfPagesError):
        blocks.allocate(Seq(prompt(32, 500)))
    settle(blocks)
    blocks.deallocate(one)
    other = Seq(prompt(32, 500))
    assert blocks.can_allocate(other)
    blocks.allocate(other)  # evicts the end of the first chain, not its beginning
    assert blocks.peek(prompt(48)).kv_length == 32
    settle(blocks)


def test_a_running_sequence_that_finds_no_block_cannot_append() -> None:
    blocks, seq = manager(n_pages=3), Seq(prompt(32))
    blocks.allocate(seq)
    seq.token_ids.append(1)
    assert not blocks.can_append(seq)
    with pytest.raises(OutOfPagesError):
        blocks.may_append(seq)
    assert len(seq.block_table) == 2
    settle(blocks)


def test_after_deallocation_blocks_stay_cached_until_needed() -> None:
    blocks, seq = manager(), Seq(prompt(40))
    blocks.allocate(seq)
    blocks.deallocate(seq)
    assert (seq.block_table, seq.num_cached_tokens) == ([], 0)
    assert (blocks.total_cached_pages, blocks.page_table.pages_private) == (2, 0)
    again = Seq(prompt(40))
    blocks.allocate(again)
    assert again.num_cached_tokens == 32


def test_with_caching_off_nothing_is_shared() -> None:
    blocks, one, two = manager(enable_prefix_caching=False), Seq(prompt(40)), Seq(prompt(40))
    blocks.allocate(one)
    blocks.allocate(two)
    assert two.num_cached_tokens == 0
    assert blocks.total_cached_pages == 0
    blocks.deallocate(one)
    blocks.deallocate(two)
    assert blocks.page_table.pages_available == blocks.page_table.total_pages


def test_namespaces_do_not_share() -> None:
    blocks, lora = manager(), CacheNamespace(lora_id=1)
    blocks.allocate(Seq(prompt(40)))
    seq = Seq(prompt(40), namespace=lora)
    blocks.allocate(seq)
    assert seq.num_cached_tokens == 0
    assert blocks.peek(prompt(32), lora).kv_length == 32


def test_a_match_never_ends_inside_an_image() -> None:
    blocks = manager()
    tokens = [*map(TextToken, prompt(10)), ImageToken(5, 30), *map(TextToken, prompt(10))]
    blocks.allocate(Seq(tokens))
    other = Seq([*tokens[:2], *map(TextToken, prompt(60, 900))])
    blocks.allocate(other)
    assert other.num_cached_tokens == 0
    assert blocks.peek([*tokens, TextToken(1)]).kv_length == 48
    assert (
        blocks.peek([*tokens[:11], *map(TextToken, prompt(8, 70))]).kv_length == 0
    )  # 40 positions end in block 2


@pytest.mark.parametrize("size", [2, 8, 24])
def test_page_sizes_that_kernels_cannot_use_are_refused(size: int) -> None:
    with pytest.raises(PageSizeError, match=f"got {size}"):
        BlockManager(PageTable(10, size))


def test_the_radix_cache_wants_pages_of_one() -> None:
    with pytest.raises(PageSizeError, match="got 16"):
        RadixPrefixCache(PageTable(10, 16))


def test_misuse_is_refused() -> None:
    blocks, seq = manager(), Seq(prompt(20))
    blocks.allocate(seq)
    with pytest.raises(CacheStateError, match="already has"):
        blocks.allocate(seq)
    blocks.deallocate(seq)
    with pytest.raises(CacheStateError, match="allocate first"):
        blocks.deallocate(seq)
    with pytest.raises(UnlockWithoutLockError):
        blocks.unlock(blocks.match_prefix(prompt(16)).last_node)
    settle(blocks)
