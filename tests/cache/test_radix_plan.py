"""The reference's test plan for the radix cache: its eighteen points, one test each."""

import numpy as np
import pytest

from petiole.cache import (
    CacheNamespace,
    ConservationError,
    ImageToken,
    OutOfPagesError,
    PageTable,
    RadixPrefixCache,
    UnlockWithoutLockError,
)
from tests.cache.toy_kv import ToyEngine, texts

BOS = 1
IMAGE = ImageToken(content_hash=0xC0FFEE << 100, kv_length_=729)


class Setup:
    """A table and a radix cache, driven by hand."""

    def __init__(self, n_pages: int = 100) -> None:
        self.table = PageTable(n_pages, page_size=1, max_batch_size=10)
        self.cache = RadixPrefixCache(self.table)
        self.table.set_prefix_cache(self.cache)

    def insert(self, tokens, namespace=None):
        """Insert a sequence with fresh pages in a row of its own, which stays held."""
        row = self.table.allocate()
        kv = sum(token.kv_length() for token in tokens)
        self.table.map_pages(row, 0, self.table.allocate_pages(kv))
        return row, self.cache.insert(tokens, self.table.get_pages(row, 0, kv), namespace)

    def settled(self) -> bool:
        self.cache.check()
        self.table.check()
        return self.table.pages_available + self.cache.total_cached_pages == self.table.total_pages


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_01_a_match_that_ends_inside_a_segment_splits_it(setup: Setup) -> None:
    row, _ = setup.insert(texts(1, 2, 3, 4))
    pages = setup.table.get_pages(row, 0, 4).tolist()
    found = setup.cache.match_prefix(texts(1, 2, 9))
    assert (found.matched_token_count, found.matched_pages.tolist()) == (2, pages[:2])
    upper = found.last_node
    (lower,) = upper.children.values()
    assert (len(upper.tokens), len(lower.tokens)) == (2, 2)
    assert lower.physical_pages.tolist() == pages[2:]


def test_02_an_image_counts_with_all_its_positions() -> None:
    setup = Setup(1000)
    tokens = [*texts(BOS), IMAGE, *texts(5, 6)]
    setup.insert(tokens)
    whole = setup.cache.match_prefix(tokens)
    assert (whole.matched_token_count, whole.matched_kv_length, len(whole.matched_pages)) == (4, 732, 732)
    assert setup.cache.match_prefix(tokens[:2]).matched_kv_length == 730


def test_03_a_lock_covers_the_ancestors_and_cannot_go_below_zero(setup: Setup) -> None:
    _, result = setup.insert(texts(1, 2, 3))
    node = result.node
    setup.cache.lock(node)
    assert (node.lock_ref, node.parent.lock_ref) == (1, 1)
    setup.cache.unlock(node)
    assert (node.lock_ref, node.parent.lock_ref) == (0, 0)
    with pytest.raises(UnlockWithoutLockError):
        setup.cache.unlock(node)
    assert (node.lock_ref, node.parent.lock_ref) == (0, 0)


def test_04_after_a_miss_the_prompt_stays_cached_until_it_is_evicted(setup: Setup) -> None:
    before = setup.table.pages_available
    row, result = setup.insert(texts(*range(10)))
    setup.cache.lock(result.node)
    assert result.inserted_pages == 10
    setup.cache.unlock(result.node)
    setup.table.erase(row)
    assert setup.table.pages_available == before - 10
    setup.cache.evict(10)
    assert setup.table.pages_available == before
    assert setup.settled()


def test_05_after_a_partial_hit_only_the_suffix_is_claimed(setup: Setup) -> None:
    tokens = texts(*range(10))
    first, _ = setup.insert(tokens[:5])
    found = setup.cache.match_prefix(tokens)
    row = setup.table.allocate()
    setup.table.map_pages(row, 0, found.matched_pages)
    setup.table.reserve(row, 10)
    setup.cache.lock(found.last_node)
    result = setup.cache.insert(tokens, setup.table.get_pages(row, 0, 10), None, found.last_node, 5, 5)
    assert (result.inserted_pages, result.start, result.end) == (5, 5, 10)
    setup.cache.unlock(found.last_node)
    setup.table.erase(row)
    setup.table.erase(first)
    assert setup.cache.total_cached_pages == 10
    assert setup.settled()


def test_06_inserting_twice_claims_nothing_the_second_time(setup: Setup) -> None:
    _, first = setup.insert(texts(1, 2, 3))
    row, second = setup.insert(texts(1, 2, 3))
    assert second.node is first.node
    assert (second.inserted_pages, setup.cache.total_cached_pages) == (0, 3)
    setup.table.erase(row)  # the duplicates were the row's own
    setup.table.check()


def test_07_handing_a_lock_over_to_the_same_node_keeps_exactly_one() -> None:
    engine = ToyEngine("radix")
    engine.run(texts(1, 2, 3))
    sequence = engine.start(texts(1, 2, 3))
    sequence.launch(2)  # the published prefix ends where the reused one does
    found = engine.cache.match_prefix(texts(1, 2))
    assert found.last_node.lock_ref == 1
    sequence.finish()
    assert engine.cache.evictable_page_count() == engine.cache.total_cached_pages


def test_08_a_full_match_leaves_one_position_to_compute() -> None:
    engine = ToyEngine("radix")
    prompt = texts(BOS, 5, 6)
    first = engine.run(prompt)
    sequence = engine.start(prompt)
    assert sequence.kv.reused == len(prompt) - 1
    shared = set(engine.cache.match_prefix(prompt).matched_pages.tolist())
    assert set(sequence.slots(2, 3)).isdisjoint(shared)  # nothing is written where others read
    sequence.launch()
    assert sequence.logits() == first


def test_09_sequences_that_share_a_prefix_decode_independently() -> None:
    engine = ToyEngine("radix", n_pages=900)
    prompt = [*texts(BOS), IMAGE, *texts(7)]
    one = engine.start(prompt)
    one.launch()
    two = engine.start(prompt)  # the first one is still running
    two.launch()
    assert one.slots(0, 730) == two.slots(0, 730)
    for i in range(10):
        assert one.append(texts(100 + i)[0])
        assert two.append(texts(200 + i)[0])
    assert set(one.slots(731, 741)).isdisjoint(two.slots(731, 741))
    assert one.logits() == one.expected_logits() != two.logits() == two.expected_logits()


def test_10_a_full_match_maps_only_what_is_reused_and_leaks_nothing(setup: Setup) -> None:
    prompt = texts(BOS, 5, 6, 7)
    row, _ = setup.insert(prompt)
    setup.table.erase(row)
    before = setup.table.pages_available
    found = setup.cache.match_prefix(prompt)
    reused = min(found.matched_kv_length, len(prompt) - 1)
    row = setup.table.allocate()
    setup.table.map_pages(row, 0, found.matched_pages[:reused])
    assert setup.table.page_count(row) == 3
    setup.table.map_pages(row, reused, setup.table.allocate_pages(1))
    setup.cache.lock(found.last_node)
    private = setup.table.get_pages(row, 3, 4)[0]
    assert private not in found.matched_pages
    setup.cache.unlock(found.last_node)
    setup.table.erase(row)
    assert private in setup.table.free_pages
    assert setup.table.pages_available == before
    assert setup.settled()


def test_11_a_hit_of_one_token_leaks_nothing() -> None:
    engine = ToyEngine("radix")
    engine.run(texts(BOS, *range(10, 19)))
    sequence = engine.start(texts(BOS, 100, 101))
    assert sequence.kv.reused == 1
    sequence.launch()
    assert engine.cache.total_cached_pages == 10 + 2
    sequence.finish()
    engine.cache.evict(engine.cache.total_cached_pages)
    assert engine.table.pages_available == engine.table.total_pages


def test_12_every_path_gives_the_same_logits() -> None:
    prompt = [*texts(BOS), ImageToken(5, 9), *texts(2, 3, 4)]
    without = ToyEngine("off").run(prompt)
    engine = ToyEngine("radix")
    full_prefill, append_prefill = engine.run(prompt), engine.run(prompt)
    assert engine.cache.stats.hits == 1
    assert without == full_prefill == append_prefill


def test_13_under_memory_pressure_only_unlocked_prefixes_give_way(setup: Setup) -> None:
    nodes = []
    for i in range(9):
        pages = setup.table.allocate_pages(11)
        nodes.append(setup.cache.insert(texts(*range(100 * i, 100 * i + 11)), pages).node)
        setup.cache.lock(nodes[-1])
    with pytest.raises(OutOfPagesError, match="cached prefixes are locked"):
        setup.table.allocate_pages(10)
    assert setup.cache.total_cached_pages == 99
    for node in nodes[:5]:
        setup.cache.unlock(node)
    assert len(setup.table.allocate_pages(10)) == 10


def test_14_no_page_is_freed_twice_whatever_hits() -> None:
    engine, rng = ToyEngine("radix", n_pages=40), np.random.default_rng(14)
    for _ in range(300):
        engine.run(texts(BOS, *rng.integers(0, 3, rng.integers(1, 8)).tolist()))  # checks after each
    usage = engine.manager.usage()
    assert usage.pages_free + usage.pages_cached == usage.pages_total
    assert usage.cache.hits > 0
    assert usage.cache.evictions > 0


def test_15_pages_are_conserved_over_miss_full_match_and_partial_hit() -> None:
    engine = ToyEngine("radix")
    for prompt, reused in [((BOS, 1, 2), 0), ((BOS, 1, 2), 2), ((BOS, 1, 3, 4), 2)]:
        sequence = engine.start(texts(*prompt))
        assert sequence.kv.reused == reused
        sequence.launch()
        sequence.finish()
        engine.manager.check()
        usage = engine.manager.usage()
        assert (usage.pages_private, usage.pages_free + usage.pages_cached) == (0, usage.pages_total)
    engine.cache.evict(engine.cache.total_cached_pages)
    assert engine.table.pages_available == engine.table.total_pages


def test_16_empty_namespaces_are_pruned(setup: Setup) -> None:
    namespaces = [CacheNamespace(image_hash=i) for i in range(9)]
    for namespace in namespaces:
        setup.cache.insert(texts(BOS, 1, 2), setup.table.allocate_pages(3), namespace)
    assert len(setup.cache._trees) == 9
    setup.cache.evict(27)
    assert len(setup.cache._trees) == 0
    setup.cache.insert(texts(BOS, 1), setup.table.allocate_pages(2), namespaces[0])
    assert len(setup.cache._trees) == 1


def test_17_looking_up_unknown_namespaces_creates_nothing(setup: Setup) -> None:
    for i in range(100):
        found = setup.cache.match_prefix(texts(BOS, 1), CacheNamespace(image_hash=i))
        assert (found.matched_kv_length, found.last_node) == (0, None)
    assert len(setup.cache._trees) == 0


def test_18_page_offsets_follow_from_kv_lengths() -> None:
    setup = Setup(1000)
    prefix = [*texts(BOS), IMAGE]
    whole = prefix + texts(*range(10))
    setup.cache.insert(prefix, setup.table.allocate_pages(730))
    found = setup.cache.match_prefix(whole)
    assert (found.matched_token_count, found.matched_kv_length) == (2, 730)
    pages = np.concatenate([found.matched_pages, setup.table.allocate_pages(10)])
    result = setup.cache.insert(whole, pages, None, found.last_node, 2, 730)
    assert result.inserted_pages == 10
    assert result.node.physical_pages.tolist() == pages[730:].tolist()


def test_a_roots_wrong_lock_count_is_found(setup: Setup) -> None:
    _, result = setup.insert(texts(1, 2, 3))
    result.node.parent.lock_ref += 1
    with pytest.raises(ConservationError, match=r"root of .*\(R2\): 1 kept, 0 counted"):
        setup.cache.check()


def test_a_root_with_a_wrong_lock_count_is_not_pruned(setup: Setup) -> None:
    _, result = setup.insert(texts(1, 2, 3))
    result.node.parent.lock_ref += 1
    with pytest.raises(ConservationError, match="root of"):
        setup.cache.evict(3)


def test_a_detached_node_counts_among_its_roots_locks(setup: Setup) -> None:
    _, result = setup.insert(texts(1, 2, 3))
    setup.cache.lock(result.node)
    root = result.node.parent
    setup.cache._detach(result.node)
    setup.cache.check()
    root.lock_ref += 1
    with pytest.raises(ConservationError, match="2 kept, 1 counted"):
        setup.cache.check()
    root.lock_ref -= 1
    setup.cache.unlock(result.node)
    setup.cache.check()
    assert setup.cache.total_cached_pages == 0
