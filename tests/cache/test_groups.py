"""Groups of layers with windows, against a model that remembers everything.

The model knows the fingerprint of every position that was ever computed. A look-up must end at the deepest
position at which each group still has what it reads there, found position by position. Every step must read the
right fingerprints within its window, and the books of all pools must add up after every step.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from petiole.cache import CacheTokens, KVAllocation, PageCounts, WindowPages, build_manager, most_pages
from petiole.cache.exceptions import ConservationError
from petiole.cache.groups.companions import CompanionPool
from petiole.cache.groups.manager import GroupedManager
from petiole.cache.groups.recurrent_states import StateGroup
from petiole.cache.groups.windows import IN_FLIGHT, STRIDE
from petiole.cache.prefix.eviction import AgeQueue
from petiole.cache.tokens import reuse_limit
from tests.cache.toy_kv import PAGE_SIZES, fingerprints, texts

STEP = 24
DICE = st.integers(0, 2**32 - 1).map(random.Random)


class Engine:
    """Pools of groups, and what was written into their pages, by group (0: the table's own), page and offset."""

    def __init__(
        self,
        kind: str,
        windows: tuple[int, ...],
        *,
        n_pages: int,
        spare: int = 0,
        rows: int = 5,
        snapshots: int = 0,
    ) -> None:
        self.page = PAGE_SIZES[kind]
        sizes = [WindowPages(w, 1 + most_pages(w, self.page, STEP) + spare) for w in windows]
        manager = build_manager(
            kind,  # type: ignore[arg-type]
            n_pages,
            self.page,
            rows,
            windows=sizes,
            snapshots=snapshots,
            longest_step=STEP,
        )
        assert isinstance(manager, GroupedManager)
        self.manager, self.table = manager, manager.table
        self.groups, self.states = self.table.windows, self.table.states
        self.live: dict[int, int] = {}  # row -> the fingerprint in its state
        self.kept: dict[int, int] = {0: 0}  # snapshot -> the fingerprint in it
        self.memory: dict[tuple[int, int], int] = {}  # (group, slot) -> fingerprint
        self.content: dict[int, tuple[int, ...]] = {}  # page -> what a match finds in it, at the table's own pages

    def start(self, ids: list[int]) -> "Row | None":
        kv = self.manager.start(np.array(ids))
        return None if kv is None else Row(self, ids, kv)

    def run(self, ids: list[int], answer: list[int] | None = None, chunk: int = STEP) -> int:
        """A whole request. Returns how many positions it reused."""
        row = self.start(ids)
        assert row is not None
        while row.computed < len(ids):
            assert row.step(min(chunk, len(ids) - row.computed))
        for token in answer or []:
            row.append(token)
            assert row.step(1)
        row.finish()
        return row.reused

    def make_and_unmake(self, row: int, start: int, end: int) -> None:
        """The snapshots of a step that is never launched."""
        if self.states is not None:
            made = self.states.make(self.table.matrix, np.array([row]), np.array([start]), np.array([end]))
            self.states.unmake(made)

    def slots(self, group: int, pages: np.ndarray) -> list[int]:
        """The slots of all positions of these pages of the table. Those without a companion lie in page 0."""
        own = pages if group == 0 else self.groups[group - 1].pool.of[pages]
        return [int(page) * self.page + k for page in own.tolist() for k in range(self.page)]

    def expected_match(self, ids: list[int]) -> int:
        """The deepest position at which every group has what it reads, looked at one by one."""
        codes = np.array(ids)
        pages = self.manager.cache.find(codes[: reuse_limit(codes, self.page)])
        for n in range(len(pages), 0, -1):
            p = n * self.page
            if all(
                group.pool.of[pages[at // self.page]]
                for group in self.groups
                for at in range(max(0, p - group.window + 1), p)
            ) and (self.states is None or self.states.pool.of[pages[n - 1]]):
                return p
        return 0


class Row:
    def __init__(self, engine: Engine, ids: list[int], kv: KVAllocation) -> None:
        self.engine, self.ids, self.kv = engine, list(ids), kv
        self.computed = self.reused = kv.reused
        self.row = kv.row
        self._prints: list[int] | None = None

    @property
    def prints(self) -> list[int]:
        if self._prints is None or len(self._prints) != len(self.ids):
            self._prints = fingerprints(texts(*self.ids))
        return self._prints

    def append(self, token: int) -> None:
        self.ids.append(token)

    def cut(self) -> None:
        """Forget the tokens that were not computed or not accepted."""
        del self.ids[self.computed :]
        self._prints = None

    def pages(self) -> np.ndarray:
        table = self.engine.table
        return table.get_pages(self.row, 0, table.page_count(self.row))

    def step(self, n: int, kept: int | None = None) -> bool:
        """Compute `n` positions, of which `kept` are accepted (None: all are certain). False: pages are short."""
        engine, start, end = self.engine, self.computed, self.computed + n
        if engine.table.reserve_many(np.array([self.row]), np.array([end])) < 1:
            return False
        if kept is None:
            taken = self.kv.publish(CacheTokens.from_text(self.ids), end)
            self.note(taken.start, taken.end)
        prints = self.prints
        for g in range(len(engine.groups) + 1):
            first = max(0, start - (40 if g == 0 else engine.groups[g - 1].window) + 1)
            base = first // engine.page * engine.page
            slots = engine.slots(g, self.pages()[first // engine.page :])
            read, written = slots[first - base : start - base], slots[start - base : end - base]
            assert [engine.memory.get((g, slot)) for slot in read] == prints[first:start]
            assert 0 not in {slot // engine.page for slot in [*read, *written]}, "a position without a page"
            engine.memory.update(zip([(g, slot) for slot in written], prints[start:end], strict=True))
        if engine.states is not None:
            self._advance(engine.states, start, end)
        engine.table.slide(np.array([self.row]), np.array([start + 1 if kept is not None else end]))
        self.computed = end if kept is None else start + kept
        if kept is None:
            self.kv.share(self.computed)
        else:
            self.kv.trim(self.computed)
        return True

    def _advance(self, states: StateGroup, start: int, end: int) -> None:
        """What a device does with states: begin, advance position by position, keep."""
        engine, prints = self.engine, self.prints
        if start == self.reused:
            engine.live[self.row] = engine.kept[states.source(self.row)]
        made = states.make(engine.table.matrix, np.array([self.row]), np.array([start]), np.array([end]))
        kept = dict(zip(made.positions.tolist(), made.slots.tolist(), strict=True))
        for at in range(start, end):
            assert engine.live[self.row] == (prints[at - 1] if at else 0)
            engine.live[self.row] = prints[at]
            if at + 1 in kept:
                engine.kept[kept[at + 1]] = prints[at]

    def note(self, start: int, end: int) -> None:
        size, prints = self.engine.page, self.prints
        for page, at in zip(
            self.pages()[start // size : end // size].tolist(), range(start, end, size), strict=True
        ):
            self.engine.content[page] = tuple(prints[at : at + size])

    def finish(self) -> None:
        pages = self.pages()
        taken = self.kv.publish(CacheTokens.from_text(self.ids), self.computed)
        assert np.array_equal(pages, self.pages())
        self.note(taken.start, taken.end)
        self.kv.discard()

    def held(self) -> tuple[int, ...]:
        return tuple(group.held(self.row) for group in self.engine.groups)


class GroupMachine(RuleBasedStateMachine):
    kind = "radix"

    @initialize(windows=st.sampled_from([(6,), (1, 20), (40, 3)]), spare=st.sampled_from([0, 10, 200]))
    def build(self, windows: tuple[int, ...], spare: int) -> None:
        self.engine = Engine(self.kind, windows, n_pages=240 // PAGE_SIZES[self.kind] + 40, spare=spare)
        self.running: list[Row] = []

    def prompt(self, dice: random.Random) -> list[int]:
        """Few distinct prompts, which share beginnings."""
        parts = [(dice.randint(0, 1), dice.choice([4, 17, 40])), (dice.randint(2, 3), dice.choice([1, 20]))]
        parts.append((dice.randint(4, 5), dice.choice([1, 3, 18])))
        longer = 1 if self.engine.page == 1 else 3
        return [token for token, n in parts for _ in range(n * longer)]

    def pick(self, dice: random.Random) -> Row:
        return dice.choice(self.running)

    @rule(dice=DICE)
    def start(self, dice: random.Random) -> None:
        ids = self.prompt(dice)
        if self.running and dice.random() < 0.3:  # a fork of a running row
            origin = self.pick(dice)
            taken = origin.kv.publish(CacheTokens.from_text(origin.ids), origin.computed)
            origin.note(taken.start, taken.end)
            ids = [*origin.ids[: dice.randint(1, len(origin.ids))], 9]
        expected, manager = self.engine.expected_match(ids), self.engine.manager
        assert manager.match_length(np.array(ids)) == expected <= manager.known_length(np.array(ids))
        needed, available = manager.pages_to_start(np.array(ids)), manager.pages_available
        row = self.engine.start(ids)
        rows_left = self.engine.table.rows_available + (row is not None)
        assert row is not None or not rows_left or not needed <= available
        if row is not None:
            assert row.reused == expected
            self.running.append(row)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def chunk(self, dice: random.Random) -> None:
        row = self.pick(dice)
        if row.computed < len(row.ids):
            n = min(dice.randint(1, STEP), len(row.ids) - row.computed)
            needed, available = (
                self.engine.manager.new_pages(row.row, row.computed + n),
                self.engine.manager.pages_available,
            )
            assert row.step(n) == (needed <= available)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def decode(self, dice: random.Random) -> None:
        row = self.pick(dice)
        if row.computed == len(row.ids):
            row.append(dice.randint(6, 7))
            if not row.step(1):
                row.cut()

    @precondition(lambda self: self.running)
    @rule(dice=DICE, drafts=st.integers(1, 4))
    def verify(self, dice: random.Random, drafts: int) -> None:
        row = self.pick(dice)
        if row.computed < len(row.ids):
            return
        row.ids += [dice.randint(6, 7) for _ in range(1 + drafts)]
        kept = dice.randint(1, 1 + drafts)
        row.step(1 + drafts, kept)
        row.cut()

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def fail_a_launch(self, dice: random.Random) -> None:
        """Reserved and published, but never dispatched."""
        row = self.pick(dice)
        n, published = min(STEP, len(row.ids) - row.computed), row.kv.published
        pages = self.engine.table.page_count(row.row)
        if n and self.engine.table.reserve_many(np.array([row.row]), np.array([row.computed + n])):
            row.kv.publish(CacheTokens.from_text(row.ids), row.computed + n)
            self.engine.make_and_unmake(row.row, row.computed, row.computed + n)
            assert row.kv.unpublish(published)
            self.engine.table.truncate(row.row, pages * self.engine.page)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def note_an_end(self, dice: random.Random) -> None:
        row = self.pick(dice)
        self.engine.manager.keep(row.row, [dice.randint(1, len(row.ids))])

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def finish(self, dice: random.Random) -> None:
        self.running.pop(dice.randrange(len(self.running))).finish()

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def discard(self, dice: random.Random) -> None:
        self.running.pop(dice.randrange(len(self.running))).kv.discard()

    @rule(dice=DICE)
    def evict(self, dice: random.Random) -> None:
        cache = self.engine.manager.cache
        cache.evict(dice.randint(0, cache.evictable_page_count()))

    @rule(dice=DICE)
    def flush(self, dice: random.Random) -> None:
        if dice.random() < 0.1:
            self.engine.manager.flush()

    @invariant()
    def every_pool_adds_up(self) -> None:
        self.engine.manager.check()

    @invariant()
    def companions_hold_what_their_pages_stand_for(self) -> None:
        engine = self.engine
        for page in engine.manager.cache.owned_pages().tolist():
            for g, group in enumerate(engine.groups, 1):
                if group.pool.of[page]:
                    found = [engine.memory.get((g, slot)) for slot in engine.slots(g, np.array([page]))]
                    assert tuple(found) == engine.content[page]
            if engine.states is not None and (snapshot := int(engine.states.pool.of[page])):
                assert engine.kept[snapshot] == engine.content[page][-1]

    @invariant()
    def rows_hold_no_more_than_they_may(self) -> None:
        for row in self.running:
            assert all(held <= group.most for held, group in zip(row.held(), self.engine.groups, strict=True))

    def teardown(self) -> None:
        for row in getattr(self, "running", []):
            row.kv.discard()
        if hasattr(self, "engine"):
            self.engine.manager.flush()
            self.engine.manager.check()
            assert all(group.pool.free == group.pool.total for group in self.engine.table.groups)


class BlockGroupMachine(GroupMachine):
    kind = "block"


class UncachedGroupMachine(GroupMachine):
    kind = "off"


budget = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = budget
TestBlockGroupMachine = BlockGroupMachine.TestCase
TestBlockGroupMachine.settings = budget


@pytest.mark.parametrize("machine", [GroupMachine, BlockGroupMachine, UncachedGroupMachine])
@pytest.mark.parametrize(("windows", "spare"), [((6,), 0), ((1, 20), 10), ((40, 3), 200)])
def test_a_long_walk_under_load(machine: type[GroupMachine], windows: tuple[int, ...], spare: int) -> None:
    walk, dice = machine(), random.Random(f"{machine.kind} {windows}")
    walk.build(windows, spare)
    busy = [
        *[walk.chunk] * 6, *[walk.decode] * 8, *[walk.verify] * 3, walk.fail_a_launch, walk.note_an_end,
        *[walk.finish] * 2, walk.discard,
    ]  # fmt: skip
    for step in range(250):
        action = (
            walk.flush
            if step % 50 == 49
            else dice.choice([*[walk.start] * 3, walk.evict, *busy * bool(walk.running)])
        )
        if action == walk.verify:
            walk.verify(dice, dice.randint(1, 4))
        else:
            action(dice)
        walk.every_pool_adds_up()
        walk.companions_hold_what_their_pages_stand_for()
        walk.rows_hold_no_more_than_they_may()
    walk.teardown()
    assert walk.engine.manager.cache.stats.hits > 0 or machine.kind == "off"


# ---------------------------------------------------------------- what rows hold and what stays


def radix(*windows: int, n_pages: int = 2000, spare: int = 100) -> Engine:
    return Engine("radix", windows, n_pages=n_pages, spare=spare)


def test_a_row_of_eight_windows_holds_no_more_than_one_of_two() -> None:
    engine, most = radix(32), 0
    row = engine.start(list(range(8 * 32)))
    assert row is not None
    at_two = 0
    while row.computed < len(row.ids):
        assert row.step(16)
        most = max(most, *row.held())
        at_two = most if row.computed == 2 * 32 else at_two
    assert most == at_two <= 32 + IN_FLIGHT + STRIDE
    for _ in range(8 * 32):
        row.append(7)
        assert row.step(1)
        assert row.held()[0] <= 32 + IN_FLIGHT + STRIDE
    assert engine.manager.pages_held(row.row) <= PageCounts(len(row.ids), 32 + IN_FLIGHT + STRIDE)


def question(system: list[int], k: int, n: int = 60) -> list[int]:
    return [*system, *range(10_000 + 1000 * k, 10_000 + 1000 * k + n)]


def test_the_second_prompt_of_a_beginning_makes_it_serve_and_the_third_reuses_it() -> None:
    engine, system = radix(16, spare=20), list(range(1, 200))
    reused = [engine.run(question(system, k), answer=[5] * 40) for k in range(6)]
    assert reused == [0, 0, *[len(system)] * 4]


def test_the_end_of_a_message_serves_from_the_second_prompt_on() -> None:
    engine, system = radix(16, spare=20), list(range(1, 200))
    first = engine.start(question(system, 0))
    assert first is not None
    engine.manager.keep(first.row, [len(system)])
    while first.computed < len(first.ids):
        assert first.step(min(STEP, len(first.ids) - first.computed))
    first.finish()
    assert [engine.run(question(system, k)) for k in range(1, 5)] == [len(system)] * 4


def test_a_turn_of_a_conversation_computes_what_is_new() -> None:
    engine, ids = radix(16, spare=20), list(range(50))
    for turn in range(5):
        answer = [100 + turn] * 90
        reused = engine.run(ids, answer)
        assert reused == (0 if turn == 0 else len(ids) - 30)
        ids = [*ids, *answer, *range(1000 * turn, 1000 * turn + 30)]


def test_a_fork_of_a_running_answer_reuses_it_up_to_where_it_was_read() -> None:
    engine = radix(16, 48)
    origin = engine.start(list(range(100)))
    assert origin is not None
    while origin.computed < 100:
        assert origin.step(20)
    for k in range(80):
        origin.append(200 + k)
        assert origin.step(1)
    fork = engine.start([*origin.ids[:177], 9])
    assert fork is not None
    assert fork.reused == 177
    assert fork.step(1)


def test_ordinary_pages_go_before_kept_ones_and_old_before_young() -> None:
    engine = radix(16, spare=0)
    group = engine.groups[0]
    engine.run(list(range(60)))
    kept = [page for page in group.pool.of.nonzero()[0].tolist() if engine.content[page][0] in set(
        fingerprints(texts(*range(60)))[44:]
    )]  # fmt: skip
    row = engine.start(list(range(500, 600)))
    assert row is not None
    while row.computed < 100 and group.pool.evicted < 60 - 16:
        assert row.step(1)
    assert group.pool.evicted >= 60 - 16 - STRIDE
    assert all(group.pool.of[page] for page in kept)
    row.kv.discard()


def hit_rates(dice: random.Random, draw: Callable[[random.Random, int], list[int]]) -> tuple[float, float]:
    """The hit rate of a model with windows in a quarter of the pages, and of one that keeps everything."""
    rates, seed = [], dice.random()
    for spare in (1000 - most_pages(64, 1, STEP), 4000):
        engine = radix(64, n_pages=4000, spare=spare)
        order = random.Random(seed)
        for k in range(30):
            engine.run(draw(order, k), answer=[k] * 8, chunk=100)
        rates.append(engine.manager.cache.stats.hit_rate)
    return rates[0], rates[1]


SYSTEMS = [[s * 100_000 + i for i in range(300)] for s in range(3)]


def test_hit_rates_with_windows_are_close_to_those_of_a_model_that_keeps_everything() -> None:
    def shared(dice: random.Random, k: int) -> list[int]:
        return [*dice.choice(SYSTEMS), *range(1000 * k, 1000 * k + dice.randint(20, 100))]

    talks: dict[int, list[int]] = {}

    def conversation(dice: random.Random, k: int) -> list[int]:
        who = dice.randrange(3)
        talks[who] = [*([] if k < 3 else talks.get(who, [])), *range(1000 * k, 1000 * k + 40)]
        return talks[who]

    for draw in (shared, conversation):
        with_windows, full = hit_rates(random.Random(draw.__name__), draw)
        assert full > 0.5
        assert with_windows >= 0.85 * full, draw.__name__


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "take"]), st.sets(st.integers(1, 9))), max_size=60))
def test_the_queue_of_ages_gives_the_oldest_first(steps: list[tuple[str, set[int]]]) -> None:
    queue, model = AgeQueue(10), list[int]()
    for what, items in steps:
        pages = np.array(sorted(items), dtype=np.int64)
        if what == "take":
            taken = queue.take(len(items))
            assert taken.tolist() == model[: len(items)]
            del model[: len(items)]
        else:
            model = [page for page in model if page not in items]
            if what == "add":
                queue.add(pages)
                model += pages.tolist()
            else:
                queue.discard(pages)
        assert len(queue) == len(model)
        assert all((page in queue) == (page in model) for page in range(10))
        queue.check()


def test_a_fault_while_the_oldest_are_taken_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = AgeQueue(10)
    queue.add(np.arange(1, 5))
    with monkeypatch.context() as patch:
        patch.setattr(AgeQueue, "_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.take(2)
    queue.check()
    assert queue.take(4).tolist() == [1, 2, 3, 4]


def test_pages_that_no_run_has_are_noticed() -> None:
    queue = AgeQueue(10)
    queue.add(np.arange(1, 5))
    queue._runs.clear()
    with pytest.raises(ConservationError, match="4 pages are here, 0 are in runs, and 4 are counted"):
        queue.check()


def test_amounts_of_several_pools_are_compared_pool_by_pool() -> None:
    small, large, mixed = PageCounts(1, 2), PageCounts(3, 4), PageCounts(0, 9)
    assert small <= large
    assert not mixed <= large
    assert mixed > large
    assert 3 <= large < 4 + small
    assert (2 + small - large).counts == (0, 0)
    assert sum([small, large]).counts == (4, 6)  # type: ignore[union-attr]


def test_rows_that_share_pages_give_them_back_together() -> None:
    """Each hold is undone, and a page becomes idle once."""
    pool, pages = CompanionPool(6, 10), np.array([3, 5])
    pool.attach(pages)
    pool.hold(pages[:1])
    pool.drop(np.array([3, 5, 3]), np.array([False, True, True]))
    assert (pool.held, pool.idle, pool.free) == (0, 2, 3)
    assert (len(pool._ordinary), len(pool._kept)) == (0, 2), "as the last row says"
