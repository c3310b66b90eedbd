"""Random lives of many sequences over each cache, against a model of a few lines.

The model knows, for each page that the cache took, the fingerprint of everything up to the page's end.  A match
must be exactly as long as the model says, reused KV must be the KV that a full prefill would have computed, and
the conservation check must hold after every step.
"""

import contextlib
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from petiole.cache import CacheNamespace, CacheToken, CacheTokens, CoordToken, ImageToken, SizeToken, TextToken
from petiole.cache.pages.page_pool import CACHED
from petiole.cache.tokens import page_boundary, reuse_limit
from tests.cache.toy_kv import PAGE_SIZES, ToyEngine, ToySequence, fingerprints

NAMESPACES = [None, None, CacheNamespace(lora_id=7), CacheNamespace(image_hash=3, salt="tenant")]
SINGLES: list[CacheToken] = [TextToken(0), TextToken(1), CoordToken(0.1, 0), SizeToken(0.1, 0.2, 0, 1)]
DICE = st.integers(0, 2**32 - 1).map(random.Random)  # choices inside a step: evenly spread, unlike drawn ones
steps_taken: dict[str, int] = {}


class InjectedError(Exception):
    """A failure in the middle of something."""


class CacheMachine(RuleBasedStateMachine):
    kind = "radix"

    @initialize(cap=st.sampled_from([None, 16]))
    def build(self, cap: int | None) -> None:
        self.engine = ToyEngine(self.kind, n_pages=40, rows=6, cap=cap)
        self.manager, self.table, self.cache = self.engine.manager, self.engine.table, self.engine.cache
        self.page = PAGE_SIZES[self.kind]
        self.cap = cap
        self.content: dict[int, int] = {}  # page -> fingerprint at its end, of all that matches can find
        self.parents: dict[int, int | None] = {}  # fingerprint of a page -> of the page before it
        self.running: list[ToySequence] = []
        self.held: list[tuple[Any, list[int]]] = []

    # --- the model ---

    def page_ends(self, prints: list[int]) -> list[int]:
        return prints[self.page - 1 :: self.page]

    def forget_evicted(self) -> None:
        self.content = {page: end for page, end in self.content.items() if self.table.owner(page) == CACHED}

    def forget_below(self, doomed: set[int]) -> None:
        """Drop fingerprints and all that builds on them."""
        while True:
            more = {end for end in self.content.values() if self.parents[end] in doomed} - doomed
            if not more:
                break
            doomed |= more
        self.content = {page: end for page, end in self.content.items() if end not in doomed}

    def expected_match(self, tokens: list[CacheToken], namespace: CacheNamespace | None) -> int:
        codes = CacheTokens.from_tokens(tokens).codes
        known, pages = set(self.content.values()), 0
        limit = reuse_limit(codes, self.page) // self.page
        for end in self.page_ends(fingerprints(tokens, namespace))[:limit]:
            if end not in known:
                break
            pages += 1
        return page_boundary(codes, pages * self.page, self.page)

    def took(self, sequence: ToySequence, start: int, end: int) -> None:
        ends: list[int] = self.page_ends(sequence.fingerprints)
        pages = self.table.get_pages(sequence.kv.row, 0, end // self.page).tolist()
        self.forget_evicted()
        for i in range(start // self.page, end // self.page):
            self.content[pages[i]] = ends[i]
            self.parents[ends[i]] = ends[i - 1] if i else None

    def pick(self, dice: random.Random) -> ToySequence:
        return dice.choice(self.running)

    def tokens(self, dice: random.Random) -> list[CacheToken]:
        """Few distinct tokens, so that prompts share prefixes; runs are about a page long."""
        tokens: list[CacheToken] = []
        for choice in dice.choices(range(len(SINGLES) + 2), [8, 4, 1, 1, 1, 1], k=dice.randint(1, 10)):
            if choice < len(SINGLES):
                tokens += [SINGLES[choice]] * max(1, self.page * 3 // 4)
            else:
                tokens.append(ImageToken(content_hash=choice, kv_length_=self.page + 2))
        return tokens

    # --- what happens ---

    @rule(dice=DICE, several=st.integers(1, 3))
    def start(self, dice: random.Random, several: int) -> None:
        for _ in range(several):
            self.start_one(dice)

    @rule(dice=DICE)
    def run_a_prompt(self, dice: random.Random) -> None:
        """From start to end, so that the cache fills."""
        if sequence := self.start_one(dice):
            self.launch_chunk_of(sequence, min(sequence.tokens.kv_length, sequence.kv.kv_capacity))
            self.running.remove(sequence)
            self.finish_one(sequence)

    def start_one(self, dice: random.Random) -> ToySequence | None:
        namespace, chunk, tokens = dice.choice(NAMESPACES), dice.choice([None, None, 3, 20]), self.tokens(dice)
        compact = CacheTokens.from_tokens(tokens)
        self.forget_evicted()  # a start before this one, in the same step, may have evicted
        expected = self.expected_match(tokens, namespace)
        assert self.manager.match_length(compact, namespace) == expected
        possible = self.manager.can_start(compact, namespace, first_chunk=chunk)
        before = self.accounts()
        try:
            sequence = self.engine.start(tokens, namespace, chunk)
        except MemoryError:
            assert not possible
            assert self.accounts() == before
            return None
        assert possible
        assert sequence.kv.reused == expected < compact.kv_length
        self.running.append(sequence)
        return sequence

    @rule(
        dice=DICE,
        place=st.sampled_from(
            ["cache.lock", "table.allocate", "table.map_pages", "table.reserve", "cache.match_prefix"]
        ),
    )
    def fail_in_the_middle_of_a_start(self, dice: random.Random, place: str) -> None:
        tokens, namespace = self.tokens(dice), dice.choice(NAMESPACES)
        owner, name = place.split(".")
        before = self.accounts()
        failure = mock.patch.object(getattr(self, owner), name, side_effect=InjectedError)
        with failure, contextlib.suppress(InjectedError, MemoryError):
            self.engine.start(tokens, namespace)
            raise AssertionError("the failure was swallowed")
        assert self.accounts() == before

    def accounts(self) -> tuple[int, ...]:
        usage = self.manager.usage()
        return (
            usage.pages_free,
            usage.pages_cached,
            usage.pages_reclaimable,
            usage.rows_held,
            self.cache.stats.hits,
        )

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def launch_chunk(self, dice: random.Random) -> None:
        sequence = self.pick(dice)
        most = min(sequence.tokens.kv_length, sequence.kv.kv_capacity)
        self.launch_chunk_of(sequence, dice.randint(min(sequence.computed, most), most))

    def launch_chunk_of(self, sequence: ToySequence, end: int) -> None:
        before = sequence.kv.published
        taken = sequence.kv.publish(sequence.tokens, end)
        sequence.compute(end)
        assert before <= sequence.kv.published <= max(before, end)
        self.took(sequence, taken.start, taken.end)

    @precondition(lambda self: self.running)
    @rule(dice=DICE, token=st.sampled_from(SINGLES))
    def decode(self, dice: random.Random, token: CacheToken) -> None:
        sequence = self.pick(dice)
        if sequence.computed == sequence.tokens.kv_length:
            enough = self.manager.pages_available
            assert sequence.append(token) or enough == 0

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def reserve_for_all(self, dice: random.Random) -> None:
        wanted = np.array([s.kv.kv_capacity + dice.randint(0, 3) for s in self.running])
        before = [s.kv.kv_capacity for s in self.running]
        done = self.table.reserve_many(np.array([s.kv.row for s in self.running]), wanted)
        for i, sequence in enumerate(self.running):
            assert sequence.kv.kv_capacity >= wanted[i] if i < done else sequence.kv.kv_capacity == before[i]
        if done < len(self.running):
            assert not self.running[done].kv.reserve(int(wanted[done]))

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def trim(self, dice: random.Random) -> None:
        sequence = self.pick(dice)
        sequence.kv.trim(max(sequence.computed, sequence.kv.published))
        assert sequence.kv.kv_capacity - max(sequence.computed, sequence.kv.published) < self.page

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def launch_fails_after_publishing(self, dice: random.Random) -> None:
        sequence = self.pick(dice)
        most = min(sequence.tokens.kv_length, sequence.kv.kv_capacity)
        keep = sequence.kv.published
        if sequence.computed < keep or most <= keep:
            return
        taken = sequence.kv.publish(sequence.tokens, most)
        self.took(sequence, taken.start, taken.end)
        assert sequence.kv.unpublish(keep)  # nobody can have matched it in between
        self.forget_evicted()

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def launch_of_several_fails_after_publishing(self, dice: random.Random) -> None:
        """Each continues where it stands. They may build on each other; nothing of it stays."""
        rows = [s for s in self.running if s.computed >= s.kv.published and not s.kv.stale]
        before = {row: (row.kv.published, row.kv.kv_capacity) for row in rows}
        dice.shuffle(rows)
        for row in rows:
            most = min(row.tokens.kv_length, row.kv.kv_capacity)
            if most > row.computed:
                row.kv.publish(row.tokens, dice.randint(row.computed, most))
        for row in reversed(rows):
            assert row.kv.unpublish(before[row][0])
            assert (row.kv.published, row.kv.kv_capacity) == before[row]
            assert not row.kv.stale
        self.forget_evicted()

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def share(self, dice: random.Random) -> None:
        sequence, free = self.pick(dice), self.table.pages_available
        committed = page_boundary(sequence.tokens.codes, dice.randint(0, sequence.computed), self.page)
        sequence.shared = max(sequence.shared, committed)
        freed = sequence.kv.share(sequence.shared)
        assert self.table.pages_available == free + freed
        pages = self.table.get_pages(sequence.kv.row, 0, min(sequence.shared, sequence.kv.published) // self.page)
        assert sequence.kv.stale or all(self.table.owner(page) == CACHED for page in pages.tolist())

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def take_back_all_that_may_be(self, dice: random.Random) -> None:
        sequence = self.pick(dice)
        pages = self.table.get_pages(sequence.kv.row, 0, sequence.kv.published // self.page).tolist()
        ends = self.page_ends(sequence.fingerprints)
        first = self.table.pages_for(max(sequence.kv.reused, sequence.shared))
        mine = [ends[i] for i in range(first, len(pages)) if self.content.get(pages[i]) == ends[i]]
        if sequence.kv.stale:
            return
        if sequence.kv.unpublish(sequence.shared):
            self.forget_evicted()
        else:
            assert sequence.kv.stale
            self.forget_below(set(mine))

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def finish(self, dice: random.Random) -> None:
        self.finish_one(self.running.pop(dice.randrange(len(self.running))))

    def finish_one(self, sequence: ToySequence) -> None:
        pages = self.table.get_pages(sequence.kv.row, 0, sequence.kv.kv_capacity // self.page).tolist()
        ends = self.page_ends(sequence.fingerprints)
        taken = sequence.kv.finish(sequence.tokens, sequence.computed)
        self.forget_evicted()
        for i in range(taken.start // self.page, taken.end // self.page):
            self.content[pages[i]] = ends[i]
            self.parents[ends[i]] = ends[i - 1] if i else None

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def discard(self, dice: random.Random) -> None:
        self.running.pop(dice.randrange(len(self.running))).kv.discard()

    @rule(dice=DICE)
    def hold_a_match(self, dice: random.Random) -> None:
        found = self.cache.match_prefix(CacheTokens.from_tokens(self.tokens(dice)), dice.choice(NAMESPACES))
        if found.last_node is not None:
            self.cache.lock(found.last_node)
            self.held.append((found.last_node, found.matched_pages.tolist()))

    @precondition(lambda self: self.held)
    @rule(dice=DICE)
    def let_go(self, dice: random.Random) -> None:
        node, _ = self.held.pop(dice.randrange(len(self.held)))
        self.cache.unlock(node)

    @rule(dice=DICE)
    def evict(self, dice: random.Random) -> None:
        before = self.cache.evictable_page_count()
        wanted = dice.randint(0, before)
        freed = self.cache.evict(wanted)
        assert before - self.cache.evictable_page_count() == freed >= wanted

    @rule(dice=DICE)
    def flush(self, dice: random.Random) -> None:
        if dice.random() < 0.2:
            self.manager.flush()
            self.content.clear()

    # --- what always holds ---

    @invariant()
    def every_page_has_one_owner(self) -> None:
        steps_taken[self.kind] = steps_taken.get(self.kind, 0) + 1
        self.manager.check()
        self.forget_evicted()
        assert self.cap is None or self.cache.total_cached_pages <= self.cap

    @invariant()
    def nothing_is_cached_without_what_it_builds_on(self) -> None:
        known = set(self.content.values())
        assert all(self.parents[end] is None or self.parents[end] in known for end in known)
        assert len(known) == len(self.content)

    @invariant()
    def held_pages_stay(self) -> None:
        assert all(self.table.owner(page) == CACHED for _, pages in self.held for page in pages)

    @invariant()
    def running_sequences_read_what_a_full_prefill_would_compute(self) -> None:
        for sequence in self.running:
            assert sequence.logits() == sequence.expected_logits()

    def teardown(self) -> None:
        for sequence in getattr(self, "running", []):
            sequence.kv.discard()
        for node, _ in getattr(self, "held", []):
            self.cache.unlock(node)
        if hasattr(self, "manager"):
            self.manager.check()
            self.manager.flush()
            assert self.table.pages_available == self.table.total_pages


class RadixMachine(CacheMachine):
    kind = "radix"


class BlockMachine(CacheMachine):
    kind = "block"


budget = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = budget
TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = budget


@pytest.mark.parametrize("machine", [RadixMachine, BlockMachine])
@pytest.mark.parametrize("cap", [None, 16, 0])
def test_a_long_walk_under_load(machine: type[CacheMachine], cap: int | None) -> None:
    """The same steps, drawn so that rows, pages and locks are mostly in use: few examples get that far."""
    walk, dice = machine(), random.Random(f"{machine.kind} {cap}")
    walk.build(cap)
    places = ["cache.lock", "table.allocate", "table.map_pages", "table.reserve", "cache.match_prefix"]
    busy = [
        *[walk.launch_chunk] * 4, *[walk.decode] * 2, *[walk.finish] * 3, walk.trim, walk.reserve_for_all,
        walk.discard, walk.launch_fails_after_publishing, walk.launch_of_several_fails_after_publishing,
        walk.take_back_all_that_may_be, *[walk.share] * 2,
    ]  # fmt: skip
    for step in range(1000):
        always = [walk.run_a_prompt, walk.hold_a_match, *[walk.start_one] * 5]
        actions = always + busy * bool(walk.running) + [walk.let_go] * 2 * len(walk.held)
        action = walk.evict if step % 20 == 0 else dice.choice(actions)
        if action == walk.decode:
            walk.decode(dice, dice.choice(SINGLES))
        elif step % 50 == 49:
            walk.fail_in_the_middle_of_a_start(dice, dice.choice(places))
        elif step % 250 == 249:
            walk.flush(dice)
        else:
            action(dice)
        walk.every_page_has_one_owner()
        walk.nothing_is_cached_without_what_it_builds_on()
        walk.held_pages_stay()
        walk.running_sequences_read_what_a_full_prefill_would_compute()
    walk.teardown()
    assert walk.cache.stats.hits > 0 or cap == 0


def test_ten_thousand_steps_were_taken() -> None:
    if set(steps_taken) != {"radix", "block"}:
        pytest.skip("the machines did not run in this selection")
    assert sum(steps_taken.values()) >= 10_000
