"""The order of eviction, for the heap alone and as the caches use it."""

import pytest
from hypothesis import given, strategies as st

from petiole.cache import EvictionError, ImageToken, StaleNodeError
from petiole.cache.prefix.eviction import EvictionHeap
from tests.cache.toy_kv import ToyEngine, texts


@given(st.lists(st.tuples(st.sampled_from(["touch", "push", "discard", "pop"]), st.integers(0, 8)), max_size=200))
def test_the_heap_is_exact_lru_and_keeps_little_dead_wood(steps) -> None:
    accessed, live = dict.fromkeys(range(9), 0), set()
    heap: EvictionHeap[int] = EvictionHeap(accessed.__getitem__)
    for clock, (step, item) in enumerate(steps, 1):
        if step == "touch":
            accessed[item] = clock
        elif step == "push":
            accessed[item] = accessed[item] if item in live else clock
            heap.push(item)
            live.add(item)
        elif step == "discard":
            heap.discard(item)
            live.discard(item)
        else:
            victim = heap.pop()
            assert victim == min(live, key=accessed.__getitem__, default=None)
            live.discard(victim)
        assert len(heap) == len(live)
        assert heap.entries <= 2 * len(live) + 65


def test_ends_go_before_what_they_build_on_and_old_ones_first() -> None:
    engine = ToyEngine("radix")
    engine.run(texts(1, 2, 3, 4))
    engine.run(texts(1, 2, 8, 9))
    engine.cache.evict(2)
    assert engine.cache.peek(texts(1, 2, 3, 4)).kv_length == 2
    assert engine.cache.peek(texts(1, 2, 8, 9)).kv_length == 4


def test_a_hit_makes_a_prefix_young_again() -> None:
    engine = ToyEngine("radix")
    engine.run(texts(1, 1, 1))
    engine.run(texts(2, 2, 2))
    engine.cache.match_prefix(texts(1, 1, 1))
    engine.cache.evict(3)
    assert engine.cache.peek(texts(1, 1, 1)).kv_length == 3
    assert engine.cache.peek(texts(2, 2, 2)).kv_length == 0


def test_a_leaf_loses_its_tail_only_as_far_as_needed() -> None:
    engine = ToyEngine("radix")
    engine.run(texts(*range(20)))
    assert engine.cache.evict(3) == 3
    assert engine.cache.peek(texts(*range(20))).kv_length == 17
    assert engine.cache.node_count == 1


def test_an_image_is_evicted_as_a_whole() -> None:
    engine = ToyEngine("radix")
    prompt = [*texts(1, 2), ImageToken(5, 6), *texts(3)]
    engine.run(prompt)
    assert engine.cache.evict(2) == 7
    assert engine.cache.peek(prompt).kv_length == 2
    engine.manager.check()


def test_inner_nodes_count_as_reclaimable() -> None:
    engine = ToyEngine("radix")
    for tail in (3, 4, 5):
        engine.run(texts(1, 2, tail))
    assert engine.cache.evictable_page_count() == engine.cache.total_cached_pages == 5
    assert engine.cache.evict(5) == 5


def test_conversations_that_grow_stay_one_node() -> None:
    engine = ToyEngine("radix", n_pages=200)
    turn = texts(1)
    for i in range(20):
        turn += texts(10 + i, 50 + i)
        engine.run(turn)
    assert engine.cache.node_count == 1
    assert engine.cache.stats.coalesced > 0


def test_a_tail_that_was_not_used_with_its_prefix_again_keeps_its_own_age() -> None:
    """It goes before what was used since; the prefix, which is the youngest, goes last."""
    engine = ToyEngine("radix", n_pages=300)
    old, other = texts(*range(100)), texts(*range(200, 260))
    engine.run(old)
    engine.run(other)
    engine.run(old[:61])
    assert engine.cache.node_count == 3
    for evicted, left in ((20, (80, 60)), (19, (61, 60)), (50, (61, 10)), (10, (61, 0)), (30, (31, 0))):
        engine.cache.evict(evicted)
        assert (engine.cache.peek(old).kv_length, engine.cache.peek(other).kv_length) == left
    engine.manager.check()


def test_a_tail_that_is_used_with_its_prefix_again_joins_it() -> None:
    engine = ToyEngine("radix", n_pages=300)
    for n in (100, 61, 30, 80, 100):
        engine.run(texts(*range(n)))
    assert engine.cache.node_count == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=40), st.integers(1, 30))
def test_what_is_evicted_was_used_before_what_stays(uses: list[tuple[int, int]], n: int) -> None:
    """Prefixes of three chains. Each position has the time of its last use."""
    engine, used = ToyEngine("radix", n_pages=50), dict[tuple[int, int], int]()
    for time, (chain, length) in enumerate(uses):
        engine.run(texts(*range(100 * chain, 100 * chain + length)))
        used.update(((chain, at), time) for at in range(length))
    evicted = engine.cache.evict(min(n, len(used)))
    kept = {
        (c, at)
        for c in range(3)
        for at in range(engine.cache.peek(texts(*range(100 * c, 100 * c + 12))).kv_length)
    }
    assert len(used) - len(kept) == evicted
    assert all(used[gone] <= used[key] for gone in used.keys() - kept for key in kept)


def test_the_reclaimable_count_of_a_cap_makes_room_for_the_newest() -> None:
    engine = ToyEngine("radix", cap=6)
    engine.run(texts(1, 1, 1, 1))
    engine.run(texts(2, 2, 2, 2))
    assert engine.cache.total_cached_pages == 6
    assert engine.cache.peek(texts(2, 2, 2, 2)).kv_length == 4
    assert engine.cache.peek(texts(1, 1, 1, 1)).kv_length == 2


@pytest.mark.parametrize("kind", ["radix", "block"])
def test_a_node_that_was_not_locked_may_be_gone(kind: str) -> None:
    engine = ToyEngine(kind)
    prompt = texts(*range(32))
    engine.run(prompt)
    node = engine.cache.match_prefix(prompt).last_node
    engine.cache.evict(engine.cache.evictable_page_count())
    with pytest.raises(StaleNodeError, match="lock what you keep"):
        engine.cache.lock(node)
    engine.manager.check()


@pytest.mark.parametrize("kind", ["radix", "block"])
def test_locked_prefixes_are_not_there_to_evict(kind: str) -> None:
    engine = ToyEngine(kind)
    engine.run(texts(*range(32)))
    running = engine.start(texts(*range(32)))
    held = engine.cache.total_cached_pages - engine.cache.evictable_page_count()
    with pytest.raises(EvictionError, match="are evictable"):
        engine.cache.evict(engine.cache.total_cached_pages)
    engine.cache.evict(engine.cache.evictable_page_count())
    assert engine.cache.total_cached_pages == held == running.kv.reused // engine.table.page_size
    running.finish()
    engine.manager.check()
