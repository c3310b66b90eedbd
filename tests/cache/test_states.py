"""Groups of layers with a state, alone and beside windows: the machine of `test_groups`, and which snapshots
are made."""

import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from petiole.cache import CacheTokens, ConservationError
from petiole.cache.groups import recurrent_states
from petiole.cache.groups.recurrent_states import FIRST_ENDS, LAST_ENDS
from tests.cache.test_groups import DICE, STEP, Engine, GroupMachine, budget


class StateMachine(GroupMachine):
    """States take no drafts, so nothing is verified."""

    @initialize(windows=st.sampled_from([(), (6,), (20, 3)]), spare=st.sampled_from([2, 4, 40]))
    def build(self, windows: tuple[int, ...], spare: int) -> None:
        n_pages = (200 if self.engine_page == 1 else 400) // self.engine_page + 40
        self.engine = Engine(self.kind, windows, n_pages=n_pages, spare=10, snapshots=spare)
        self.running = []

    @property
    def engine_page(self) -> int:
        return {"radix": 1, "block": 16, "off": 4}[self.kind]

    @rule(dice=DICE, drafts=st.integers(1, 4))
    def verify(self, dice: random.Random, drafts: int) -> None:
        pass


class BlockStateMachine(StateMachine):
    kind = "block"


class UncachedStateMachine(StateMachine):
    kind = "off"


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = budget
TestBlockStateMachine = BlockStateMachine.TestCase
TestBlockStateMachine.settings = budget


@pytest.mark.parametrize("machine", [StateMachine, BlockStateMachine, UncachedStateMachine])
@pytest.mark.parametrize(("windows", "spare"), [((), 2), ((), 6), ((6,), 4), ((20, 3), 40)])
def test_a_long_walk_under_load(
    machine: type[StateMachine], windows: tuple[int, ...], spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_states, "EVERY", 30)
    walk, dice = machine(), random.Random(f"{machine.kind} {windows} {spare}")
    walk.build(windows, spare)
    busy = [
        *[walk.chunk] * 6, *[walk.decode] * 8, walk.fail_a_launch, walk.note_an_end, *[walk.finish] * 2,
        walk.discard,
    ]  # fmt: skip
    for step in range(250):
        action = (
            walk.flush
            if step % 50 == 49
            else dice.choice([*[walk.start] * 3, walk.evict, *busy * bool(walk.running)])
        )
        action(dice)
        walk.every_pool_adds_up()
        walk.companions_hold_what_their_pages_stand_for()
        walk.rows_hold_no_more_than_they_may()
    made = walk.engine.states.made
    walk.teardown()
    assert (made > 0) == (machine.kind != "off")
    assert walk.engine.manager.cache.stats.hits > 0 or machine.kind == "off" or spare == 2


# ---------------------------------------------------------------- what gets a snapshot


def radix(*windows: int, snapshots: int = 50, n_pages: int = 6000) -> Engine:
    return Engine("radix", windows, n_pages=n_pages, snapshots=snapshots)


def question(system: list[int], k: int, n: int = 60) -> list[int]:
    return [*system, *range(10_000 + 1000 * k, 10_000 + 1000 * k + n)]


SYSTEM = list(range(1, 200))


def test_an_equal_prompt_computes_its_last_token_alone() -> None:
    engine = radix()
    assert [engine.run(question(SYSTEM, 0)) for _ in range(3)] == [0, 258, 258]


def test_the_second_prompt_of_a_beginning_makes_it_serve_and_the_third_reuses_it() -> None:
    engine = radix()
    assert [engine.run(question(SYSTEM, k), [5] * 40) for k in range(5)] == [0, 0, *[len(SYSTEM)] * 3]


def test_the_end_of_a_message_serves_from_the_second_prompt_on() -> None:
    engine = radix()
    first = engine.start(question(SYSTEM, 0))
    assert first is not None
    engine.manager.keep(first.row, [len(SYSTEM)])
    while first.computed < len(first.ids):
        assert first.step(min(STEP, len(first.ids) - first.computed))
    first.finish()
    assert [engine.run(question(SYSTEM, k)) for k in range(1, 4)] == [len(SYSTEM)] * 3


def test_a_turn_of_a_conversation_computes_what_is_new_and_the_answer_before_it() -> None:
    engine, ids = radix(), list(range(50))
    for turn in range(5):
        answer = [100 + turn] * 90
        reused = engine.run(ids, answer)
        assert reused == (0 if turn == 0 else len(ids) - 30 - 90 - 1)
        ids = [*ids, *answer, *range(1000 * turn, 1000 * turn + 30)]


def test_a_long_sequence_has_one_at_regular_distances() -> None:
    engine = radix()
    long = list(range(5000))
    engine.run(long)
    assert engine.run([*long[:4100], 7, 7]) == 4096
    assert engine.run([*long[:4000], 8, 8]) == 2048


def test_of_many_messages_the_first_and_the_last_have_one() -> None:
    engine = radix()
    row = engine.start(list(range(2000)))
    assert row is not None
    engine.manager.keep(row.row, range(20, 2000, 20))
    while row.computed < 2000:
        assert row.step(min(STEP, 2000 - row.computed))
    assert engine.states is not None
    assert engine.states.made == FIRST_ENDS + LAST_ENDS


def test_an_end_directly_behind_another_adds_nothing() -> None:
    engine = radix()
    row = engine.start(list(range(30)))
    assert row is not None
    engine.manager.keep(row.row, [10, 11, 30])  # before the last token there is one anyway
    assert row.step(20)
    assert row.step(10)
    assert engine.states is not None
    assert engine.states.made == 2


def test_the_one_that_was_used_last_outlives_the_others() -> None:
    engine = radix(snapshots=1 + 3)
    prompts = [question([k] * 20, k) for k in range(3)]
    for prompt in prompts:
        engine.run(prompt)
    assert engine.run(prompts[0]) == 79
    engine.run(question([9] * 20, 9))
    assert [engine.run(prompts[k]) for k in (0, 2)] == [79, 79]
    assert engine.manager.match_length(np.array(prompts[1])) == 0


def test_a_row_that_has_not_begun_to_compute_keeps_its_own() -> None:
    engine = radix(snapshots=1 + 1)
    prompt = question([1] * 20, 1)
    engine.run(prompt)
    row = engine.start(prompt)
    assert row is not None
    engine.run(question([2] * 20, 2))  # would take the only snapshot
    assert row.reused == 79
    assert row.step(1)
    row.finish()
    engine.run(question([2] * 20, 3))
    assert engine.manager.match_length(np.array(prompt)) == 0


def test_snapshots_go_with_their_pages() -> None:
    engine = radix()
    engine.run(question(SYSTEM, 0))
    assert engine.states is not None
    assert engine.states.pool.idle == 1
    engine.manager.cache.evict(1)  # the last page
    assert engine.states.pool.idle == 1
    engine.manager.cache.evict(1)  # the page before, behind which it stands
    assert engine.states.pool.idle == 0
    engine.manager.check()


def test_a_copy_of_cached_positions_gives_its_snapshots_away() -> None:
    engine, prompt = radix(), question(SYSTEM, 0)
    first, second = engine.start(prompt), engine.start(prompt)
    assert first is not None
    assert second is not None
    while first.computed < len(prompt):
        assert first.step(min(STEP, len(prompt) - first.computed))
    engine.states.pool.detach(first.pages())  # type: ignore[union-attr]
    while second.computed < len(prompt):
        assert second.step(min(STEP, len(prompt) - second.computed))
    assert engine.manager.match_length(np.array(prompt)) == len(prompt) - 1
    first.finish()
    second.finish()
    engine.manager.check()


def test_the_books_name_a_row_that_holds_what_it_does_not_map() -> None:
    engine, prompt = radix(), question(SYSTEM, 0)
    engine.run(prompt)
    row = engine.start(prompt)
    assert row is not None
    engine.states._begun[row.row] += 1  # type: ignore[union-attr]
    with pytest.raises(ConservationError, match=f"row {row.row} began behind page"):
        engine.manager.check()


def test_without_a_cache_nothing_is_kept() -> None:
    engine = Engine("off", (), n_pages=400, snapshots=10)
    assert [engine.run(question(SYSTEM, 0)) for _ in range(2)] == [0, 0]
    assert engine.states is not None
    assert engine.states.made == 0


def test_what_look_ups_found() -> None:
    engine = radix()
    for k in range(3):
        engine.run(question(SYSTEM, k))
    usage = engine.manager.usage().states
    assert usage is not None
    assert (usage.hit_tokens, usage.missed_tokens) == (199, 3 * 258 - 199)
    assert (usage.states_held, usage.snapshots_made) == (0, 4)
    assert usage.snapshots_free == usage.snapshots_total - 4
    assert CacheTokens.from_text(question(SYSTEM, 0)).kv_length == 259
