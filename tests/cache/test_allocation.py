"""A sequence's KV through the manager, with each cache: what an engine may rely on."""

from functools import partial
from unittest import mock

import pytest

from petiole.cache import (
    CacheNamespace,
    CacheTokens,
    ImageToken,
    MisalignedError,
    Published,
    ReleasedError,
    TextToken,
)
from tests.cache.toy_kv import PAGE_SIZES, ToyEngine, fingerprints, texts

KINDS = ["radix", "block"]


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> ToyEngine:
    return ToyEngine(request.param, n_pages=1 + 128 // PAGE_SIZES[request.param])


def prompt(n: int, first: int = 0) -> list[TextToken]:
    return [TextToken(i) for i in range(first, first + n)]


def test_an_equal_prompt_behind_a_launched_one_computes_no_prefix_again(engine: ToyEngine) -> None:
    one = engine.start(prompt(48))
    one.launch()  # not finished, not even committed
    two = engine.start(prompt(48))
    assert two.kv.reused == 48 - engine.table.page_size
    assert two.slots(0, two.kv.reused) == one.slots(0, two.kv.reused)
    two.launch()
    assert two.logits() == one.logits()


def test_only_what_is_launched_is_matchable(engine: ToyEngine) -> None:
    one = engine.start(prompt(64), chunk=32)
    assert one.kv.kv_capacity == 32
    one.launch(32)
    assert engine.manager.match_length(prompt(64)) == 32
    assert one.kv.reserve(64)
    one.launch(64)
    assert engine.manager.match_length(prompt(65)) == 64


def test_the_next_turn_reuses_what_was_generated(engine: ToyEngine) -> None:
    one = engine.start(prompt(20))
    one.launch()
    for token in prompt(30, 500):
        assert one.append(token)
    one.finish()
    expected = 50 // engine.table.page_size * engine.table.page_size
    assert engine.manager.match_length([*prompt(20), *prompt(30, 500), *prompt(9, 900)]) == expected


def test_the_first_chunk_counts_from_what_is_reused(engine: ToyEngine) -> None:
    engine.run(prompt(32))
    two = engine.start(prompt(64), chunk=16)
    assert (two.kv.reused, two.kv.kv_capacity) == (32, 48)


def test_a_start_without_room_changes_nothing(engine: ToyEngine) -> None:
    one = engine.start(prompt(112))
    one.launch()
    before = engine.manager.usage()
    stats = engine.cache.stats.hits, engine.cache.stats.misses
    assert engine.manager.start(CacheTokens.from_tokens(prompt(40, 700))) is None
    assert not engine.manager.can_start(prompt(40, 700))
    assert engine.manager.usage() == before
    assert (engine.cache.stats.hits, engine.cache.stats.misses) == stats
    assert engine.manager.can_start([*prompt(112), *prompt(8, 900)])  # a hit needs little


def test_a_hits_own_pages_do_not_count_as_evictable_for_itself(engine: ToyEngine) -> None:
    engine.run(prompt(112))
    assert not engine.manager.can_start(prompt(130))
    assert engine.manager.start(CacheTokens.from_tokens(prompt(130))) is None
    assert engine.manager.can_start([*prompt(64), *prompt(64, 700)])  # the other half can go


def test_no_row_no_start() -> None:
    engine = ToyEngine("radix", rows=2)
    engine.start(prompt(3))
    assert engine.manager.start(CacheTokens.from_tokens(prompt(3))) is None


@pytest.mark.parametrize(
    "place", ["cache.match_prefix", "cache.lock", "table.allocate", "table.map_pages", "table.reserve"]
)
def test_a_start_that_fails_anywhere_puts_everything_back(engine: ToyEngine, place: str) -> None:
    engine.run(prompt(48))
    usage = engine.manager.usage()
    before = (usage.pages_free, usage.pages_reclaimable, usage.rows_held, usage.cache.hits)
    owner, name = place.split(".")
    with (
        mock.patch.object(getattr(engine, owner), name, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.start(prompt(60))
    usage = engine.manager.usage()
    assert (usage.pages_free, usage.pages_reclaimable, usage.rows_held, usage.cache.hits) == before
    engine.manager.check()
    assert engine.start(prompt(60)).kv.reused == 48


def test_a_failed_launch_is_taken_back_and_can_be_tried_again(engine: ToyEngine) -> None:
    one = engine.start(prompt(64))
    one.launch(32)
    one.kv.publish(one.tokens, 64)
    assert one.kv.unpublish(keep_kv=32)
    assert engine.manager.match_length(prompt(65)) == 32
    assert engine.manager.usage().pages_private == one.kv.kv_capacity // engine.table.page_size - 32 // (
        engine.table.page_size
    )
    one.launch(64)
    assert engine.manager.match_length(prompt(65)) == 64
    one.finish()
    engine.manager.check()


def test_a_failed_launch_that_somebody_has_matched_is_no_longer_matchable(engine: ToyEngine) -> None:
    one = engine.start(prompt(48))
    one.kv.publish(one.tokens, 48)
    two = engine.start(prompt(60))
    assert not one.kv.unpublish(keep_kv=0)
    assert (one.kv.stale, two.kv.stale) == (True, True)
    assert engine.manager.match_length(prompt(60)) == 0
    assert two.kv.publish(two.tokens, 60) == Published(48, 48)
    one.kv.discard()
    engine.manager.check()
    two.kv.finish(two.tokens, 60)
    assert engine.table.pages_available == engine.table.total_pages
    assert engine.start(prompt(60)).kv.reused == 0


def test_taking_back_leaves_what_others_had_inserted(engine: ToyEngine) -> None:
    one, two = engine.start(prompt(32)), engine.start(prompt(48))
    one.launch()
    two.kv.publish(two.tokens, 48)  # the first 32 are the other's
    assert two.kv.unpublish(keep_kv=0)
    assert two.kv.published == 0
    assert engine.manager.match_length(prompt(48)) == 32
    one.finish()
    engine.manager.check()
    assert engine.manager.usage().pages_reclaimable == 32 // engine.table.page_size, "its lock is gone"
    two.launch()
    assert engine.manager.match_length(prompt(49)) == 48
    two.finish()
    engine.manager.check()


@pytest.mark.parametrize("start", [16, 17, 18, 31])
def test_nothing_of_a_page_that_a_failed_chunk_would_have_filled_can_be_matched(
    engine: ToyEngine, start: int
) -> None:
    """Its chunk begins inside a page."""
    one, size = engine.start(prompt(60)), engine.table.page_size
    one.launch(start)
    before = one.kv.published
    one.kv.publish(one.tokens, 60)
    assert one.kv.unpublish(keep_kv=start)
    assert one.kv.published == before == start // size * size
    assert engine.manager.match_length(prompt(60)) == before
    one.kv.discard()
    engine.manager.check()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_one_failed_launch_that_build_on_each_other_are_taken_back(kind: str, n: int) -> None:
    """The last to publish is the first to withdraw. Then none of them holds what another has to take back."""
    engine = ToyEngine(kind, n_pages=1000)
    rows = [engine.start([*prompt(16 + 16 * k), *prompt(33, 1000 * k)]) for k in range(1, n)]
    rows += [engine.start(prompt(16 + 16 * n))]
    engine.manager.check()
    for row in rows:
        row.kv.publish(row.tokens, row.tokens.kv_length)
    for row in reversed(rows):
        assert row.kv.unpublish(keep_kv=0)
        assert not row.kv.stale
        engine.manager.check()
    assert engine.cache.total_cached_pages == 0
    for row in rows:
        row.launch()
        assert row.logits() == row.expected_logits()
        row.finish()
    engine.manager.check()


def test_copies_of_what_another_published_first_are_freed_once_they_are_committed(engine: ToyEngine) -> None:
    one, two = engine.start(prompt(48)), engine.start(prompt(64))
    one.launch()
    two.launch()
    size, free = engine.table.page_size, engine.table.pages_available
    assert one.kv.share(48) == 0  # nobody else published these
    assert two.kv.share(40) == 40 // size
    assert two.kv.share(64) == 48 // size - 40 // size
    assert engine.table.pages_available == free + 48 // size
    assert two.slots(0, 48) == one.slots(0, 48)
    assert two.logits() == two.expected_logits()
    one.finish()
    engine.cache.evict(engine.cache.evictable_page_count())  # what the other row still reads is locked
    engine.run(prompt(30, 900))
    assert two.logits() == two.expected_logits()
    two.finish()
    engine.manager.check()


def test_a_running_sequence_that_publishes_its_answer_is_matched(engine: ToyEngine) -> None:
    one = engine.start(prompt(20))
    one.launch()
    for token in prompt(44, 300):
        assert one.append(token)
    one.kv.publish(one.tokens, 64)
    fork = engine.start([*prompt(20), *prompt(44, 300), *texts(7)])
    assert fork.kv.reused == 64
    assert one.append(TextToken(9))
    one.finish()
    fork.launch()
    assert fork.logits() == fork.expected_logits()
    fork.finish()
    engine.manager.check()


def test_two_rows_with_one_answer_keep_one_copy_of_it(engine: ToyEngine) -> None:
    one, two = engine.start(prompt(20)), engine.start(prompt(20))
    for sequence in (one, two):
        sequence.launch()
        for token in prompt(44, 300):
            assert sequence.append(token)
    for sequence in (one, two):
        sequence.kv.publish(sequence.tokens, 64)
        sequence.kv.share(64)
    assert two.slots(0, 64) == one.slots(0, 64)
    assert engine.manager.usage().pages_private == 0
    one.kv.discard()
    two.kv.discard()
    engine.manager.check()


def test_a_stale_row_keeps_its_own_pages(engine: ToyEngine) -> None:
    one, two = engine.start(prompt(48)), engine.start(prompt(48))
    one.launch()
    two.launch()
    before = two.slots(0, 48)
    engine.manager.flush()
    assert two.kv.share(48) == 0
    assert two.slots(0, 48) == before
    one.kv.discard()
    two.kv.discard()
    assert engine.table.pages_available == engine.table.total_pages


def test_equal_sequences_that_ran_side_by_side_leak_nothing(engine: ToyEngine) -> None:
    one, two = engine.start(prompt(48)), engine.start(prompt(48))
    one.launch()
    two.launch()  # keeps its own copies private
    for token in prompt(20, 300):
        assert two.append(token)
    two.finish()
    one.finish()
    usage = engine.manager.usage()
    assert usage.pages_private == 0
    assert usage.pages_free + usage.pages_cached == usage.pages_total
    again = engine.start([*prompt(48), *prompt(20, 300)])
    assert again.logits() == hash(tuple(fingerprints(again.typed)[: again.kv.reused]))


def test_after_a_flush_nothing_matches_and_running_sequences_cache_nothing(engine: ToyEngine) -> None:
    engine.run(prompt(32, 100))
    one = engine.start(prompt(48))
    one.launch()
    late = engine.start(prompt(32, 700))
    assert engine.manager.flush() > 0
    assert engine.manager.match_length(prompt(48)) == 0
    assert one.logits() == one.expected_logits()  # what runs keeps its pages
    late.launch()
    late.finish()
    one.finish()
    assert engine.cache.total_cached_pages == 0
    assert engine.table.pages_available == engine.table.total_pages
    engine.run(prompt(48))
    assert engine.manager.match_length(prompt(49)) == 48


def test_rejected_drafts_give_their_pages_back(engine: ToyEngine) -> None:
    one = engine.start(prompt(30))
    one.launch()
    free = engine.table.pages_available
    assert one.kv.reserve(90)
    assert one.kv.trim(31) == engine.table.pages_for(90) - engine.table.pages_for(31)
    assert free - engine.table.pages_available <= 1
    with pytest.raises(MisalignedError, match="published"):
        one.kv.trim(5)
    engine.manager.check()


def test_rejected_drafts_give_back_no_page_of_a_full_reserve(engine: ToyEngine) -> None:
    kv = engine.manager.start(CacheTokens.from_tokens(prompt(30)), kv_length=70)
    assert kv is not None
    assert kv.reserve(90)
    kv.trim(31)
    assert kv.kv_capacity == engine.table.pages_for(70) * engine.table.page_size
    kv.discard()
    engine.manager.check()


def test_discarding_keeps_what_was_published(engine: ToyEngine) -> None:
    one = engine.start(prompt(48))
    one.launch(32)
    one.kv.discard()
    assert engine.manager.match_length(prompt(48)) == 32
    assert engine.manager.usage().pages_private == 0


def test_images_and_namespaces_are_kept_apart(engine: ToyEngine) -> None:
    tokens = [*texts(1), ImageToken(99, 40), *prompt(30)]
    engine.run(tokens)
    whole = 71 // engine.table.page_size * engine.table.page_size
    assert engine.manager.match_length([*tokens, *texts(1)]) == whole
    assert engine.manager.match_length(tokens, CacheNamespace(salt="other")) == 0
    other = [*texts(1), ImageToken(98, 40), *prompt(30)]
    assert engine.manager.match_length(other) == (1 if engine.table.page_size == 1 else 0)
    ends_with_image = tokens[:2]
    assert engine.start(ends_with_image).kv.reused == (1 if engine.table.page_size == 1 else 0)


def test_without_caching_the_same_calls_work() -> None:
    engine = ToyEngine("off")
    one = engine.start(prompt(30))
    one.launch()
    assert one.kv.unpublish(keep_kv=0)
    assert one.append(TextToken(5))
    one.finish()
    assert engine.table.pages_available == engine.table.total_pages


@pytest.mark.parametrize("kind", KINDS)
def test_a_cap_of_zero_turns_reuse_off(kind: str) -> None:
    engine = ToyEngine(kind, cap=0)
    engine.run(prompt(48))
    assert (engine.cache.total_cached_pages, engine.manager.match_length(prompt(48))) == (0, 0)


def test_misuse_is_named_and_changes_nothing(engine: ToyEngine) -> None:
    one = engine.start(prompt(20))
    with pytest.raises(MisalignedError, match="kv_length 99"):
        one.kv.publish(one.tokens, 99)
    with pytest.raises(MisalignedError, match="at least one token"):
        engine.manager.start(CacheTokens())
    one.finish()
    with_length = (one.kv.unpublish, one.kv.share, one.kv.reserve, one.kv.trim)
    for call in (one.kv.discard, *(partial(call, 0) for call in with_length)):
        with pytest.raises(ReleasedError):
            call()
    assert one.kv.released
    engine.manager.check()


def test_statistics_tell_hits_from_misses(engine: ToyEngine) -> None:
    engine.run(prompt(48))
    engine.run(prompt(48))
    usage = engine.manager.usage()
    assert (usage.cache.hits, usage.cache.misses) == (1, 1)
    assert usage.cache.hit_tokens == 48 - engine.table.page_size
    assert 0 < usage.cache.hit_rate < 1
    assert usage.pages_cached == usage.pages_reclaimable == 48 // engine.table.page_size
    assert usage.cache.depth >= 1


@pytest.mark.parametrize(
    ("part", "first"), [("radix.split", 0), ("radix.unwritable", 32), ("block_cache.BlockChain", 32)]
)
def test_a_fault_while_publishing_leaves_the_pages_with_their_row(part: str, first: int) -> None:
    kind = "radix" if part.startswith("radix") else "block"
    engine = ToyEngine(kind, n_pages=1 + 128 // PAGE_SIZES[kind])
    other = engine.start(prompt(48))
    one = engine.start([*prompt(32), *prompt(16, 100)])  # nothing to match yet
    other.launch()  # `one` leaves it in the middle
    one.launch(first)
    before = engine.manager.usage().pages_private
    with mock.patch(f"petiole.cache.prefix.{part}", side_effect=MemoryError), pytest.raises(MemoryError):
        one.launch()
    engine.manager.check()
    assert engine.manager.usage().pages_private == before
    one.launch()
    assert one.logits() == one.expected_logits()
