"""The lowest priority class beside more urgent sequences: what it adds to their steps, and who waits for whom."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from petiole.gpu_worker import EngineConfig, InvalidRequest
from petiole.gpu_worker.runtime.interface import StepBatch
from petiole.gpu_worker.scheduling.planning.prefill import PART, RECENT_S, RecentDemand
from petiole.gpu_worker.scheduling.priorities.budget import (
    EXEMPT,
    FIRST,
    PROBED,
    PROBES,
    Costs,
    StepLoad,
    StepTimes,
)
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import SequenceEnded
from petiole.gpu_worker.scheduling.stopping import Finish
from tests.support.stepped import Bench, sequence
from tests.support.trials import examples

CHAT, BATCH = 0, 9
COSTS = Costs(step=8.0, row=0.5, position=0.5, context=0.001, chunk=0.25)
CHUNK = 8


class KnownTimes(StepTimes):
    """The costs are known. `measured`: the steps that would count."""

    def __init__(self, costs: Costs, widest: int) -> None:
        super().__init__(costs, widest)
        self.measured: list[StepLoad] = []

    def observe(self, load: StepLoad, seconds: float, *, alone: bool = False) -> None:
        self.measured.append(load)


class Machine(Bench):
    """`limited`: of each launched step, whether more urgent sequences decode. `exempt`: whether the lowest class
    has no limit in it."""

    def __init__(self, factor: float | str, slots: int, **config: Any) -> None:
        self.limited: list[bool] = []
        self.exempt: list[bool] = []
        super().__init__(slots=slots, batch_step_budget=factor, **config)
        self.budget = self.scheduler.planner.budget
        self.budget.times = self.times = KnownTimes(COSTS, widest=1000)

    def _forward(self, slot_id: int, batch: StepBatch) -> None:
        super()._forward(slot_id, batch)
        self.limited.append(self.budget.lowest is not None)
        self.exempt.append(self.budget.exempt)

    def share(self, i: int, lowest: bool) -> StepLoad:
        """What the lowest class, or the others, compute in a step."""
        plan, batch = self.plans[i], self.batches[i]
        kept = [k for k, seq in enumerate(plan.sequences) if (seq.rank[0] == BATCH) == lowest]
        rows, positions, context = (int(x[kept].sum()) for x in (batch.outputs, batch.lengths, batch.starts))
        return StepLoad(rows, positions, context, sum(k >= plan.n_decodes for k in kept))

    def turns(self) -> list[int]:
        """The limited steps with decodes of chats."""
        return [
            i
            for i, plan in enumerate(self.plans)
            if self.limited[i] and CHAT in priorities(plan.sequences[: plan.n_decodes])
        ]

    def run(self, rounds: int = 100_000) -> None:
        for _ in range(rounds):
            if not self.has_work:
                return
            self.round()


def priorities(sequences: Iterable[ScheduledSequence]) -> set[int]:
    return {seq.rank[0] for seq in sequences}


def machine(factor: float | str = 1.25, slots: int = 2, **config: Any) -> Machine:
    settings = {"max_num_seqs": 12, "chunk_size": CHUNK, "max_num_batched_tokens": 2 * CHUNK, **config}
    return Machine(factor, slots, **settings)


def chat(arrival: int, max_tokens: int = 40, prompt: int = 2) -> ScheduledSequence:
    return sequence([1 + arrival] * prompt, arrival, max_tokens, priority=CHAT)


def rows(n: int, arrival: int = 100, max_tokens: int = 40, prompt: int = 2) -> list[ScheduledSequence]:
    return [sequence([2 + i] * prompt, arrival + i, max_tokens, priority=BATCH) for i in range(n)]


# ---------------------------------------------------------------- the estimate


@given(costs=st.tuples(*(st.floats(0.1, 10.0) for _ in range(5))), seed=st.integers(0, 1000))
def test_the_seconds_of_steps_are_learned(costs: tuple[float, ...], seed: int) -> None:
    step, row, position, context, chunk = costs
    true = Costs(step, row / 16, position / 16, context / 4096, chunk)
    rng, times = random.Random(seed), StepTimes()
    loads = []
    for i in range(200):
        rows, chunk_positions = rng.randint(1, 64), rng.choice([0, 0, 7, 64])
        loads.append(StepLoad(rows, rows + chunk_positions, rng.randint(0, 50_000), chunk_positions > 0))
        times.observe(loads[-1], true.step + true.more(loads[-1]), alone=i % 8 == 0)
    for load in loads[-20:]:
        assert times.seconds(load) == pytest.approx(true.step + true.more(load), rel=0.02)
    assert min(times.costs) >= 0


def test_two_sizes_of_steps_suffice_for_these() -> None:
    times = StepTimes()
    for i in range(100):
        alone = i % 32 == 0
        load = StepLoad(1, 1, 50 + i) if alone else StepLoad(4, 4, 200 + 4 * i)
        times.observe(load, 1.0 if alone else 1.2, alone=alone)
    assert times.seconds(StepLoad(1, 1, 150)) == pytest.approx(1.0, rel=0.03)
    assert times.seconds(StepLoad(4, 4, 600)) == pytest.approx(1.2, rel=0.03)


def test_steps_that_another_process_delays_say_little_and_are_soon_forgotten() -> None:
    times = StepTimes()
    for i in range(100):
        times.observe(StepLoad(2, 2, 0), 1000.0 if i % 8 == 7 else 1.0)
    assert times.seconds(StepLoad(2, 2, 0)) == pytest.approx(1.0, rel=0.02)


def test_what_the_last_steps_leave_open_stays_as_it_was() -> None:
    times = StepTimes()
    true = Costs(step=1.0, row=0.05, position=0.05)
    for i in range(64):
        load = StepLoad(1 + i % 8, 1 + i % 8)
        times.observe(load, true.step + true.more(load))
    before = times.seconds(StepLoad(8, 8))
    for _ in range(1000):
        times.observe(StepLoad(4, 4), true.step + true.more(StepLoad(4, 4)))
    assert times.seconds(StepLoad(8, 8)) == pytest.approx(before, rel=0.03)


def test_steps_with_rows_that_take_long_whatever_their_number_make_those_without_no_longer() -> None:
    times, rng = StepTimes(), random.Random(0)
    for i in range(400):
        alone = i % 16 == 0
        n = 8 if alone else 8 + rng.randint(1, 16)
        times.observe(StepLoad(n, n, 50 * n), (1.0 if alone else 3.0) * rng.lognormvariate(0, 0.1), alone=alone)
    assert times.seconds(StepLoad(8, 8, 400)) == pytest.approx(1.0, rel=0.15)


def test_chunks_are_tried_again_after_delayed_ones_made_them_dear() -> None:
    times = StepTimes()
    for _ in range(8):
        times.observe(StepLoad(4, 4, 0), 1.0, alone=True)
        times.observe(StepLoad(5, 8, 0, 1), 3.0)
    dear = times.costs.more(StepLoad(1, 4, 0, 1))
    for i in range(400):
        times.observe(StepLoad(4 + i % 3, 4 + i % 3, 0), 1.0 + 0.1 * (i % 3))
    assert times.costs.more(StepLoad(1, 4, 0, 1)) < dear / 2
    assert times.seconds(StepLoad(4, 4, 0)) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tail", [0.0, 0.05, 0.15])
def test_with_a_long_tail_of_step_times_rows_still_add_what_they_may(seed: int, tail: float) -> None:
    """8 chats, rows as the estimate lets them in, and the times of a small model: each step takes a little more or
    less than its costs, and some take several times as long."""
    rng, times = random.Random(seed), StepTimes()
    true = Costs(step=0.35e-3, row=0.04e-3, position=0.04e-3, context=0.1e-6, chunk=0.2e-3)
    ratios, estimates = [], []
    for turn in range(2000):
        chat, context = 8, 8 * (32 + turn % 48)
        alone = StepLoad(chat, chat, context)
        room_s, load = 0.25 * times.seconds(alone), alone
        if turn < FIRST or turn % PROBED < PROBES:
            pass
        elif turn % 3 == 0:
            room_s -= times.costs.more(StepLoad(1, 0, 0, 1))
            positions = min(64, int(room_s / times.costs.position)) if times.costs.position else 64
            if positions > 0:
                load = StepLoad(chat + 1, chat + positions, context, 1)
        else:
            row = times.costs.more(StepLoad(1, 1, 50))
            n = min(24, int(room_s / row)) if row else 24
            load = StepLoad(chat + n, chat + n, context + 50 * n)
        seconds = true.step + true.more(load)
        late = 1 + rng.paretovariate(1.3) if rng.random() < tail else 1.0
        times.observe(load, seconds * late * rng.lognormvariate(0, 0.1), alone=load == alone)
        expected = true.step + true.more(alone)
        ratios.append(seconds / expected)
        estimates.append(times.seconds(alone) / expected)
    settled = sorted(estimates[2 * PROBED :])
    assert 0.9 < settled[len(settled) // 20] <= settled[-len(settled) // 20] < 1.2
    assert sorted(ratios)[-len(ratios) // 20] < 1.45
    assert sum(ratios) / len(ratios) > 1.1


# ---------------------------------------------------------------- what the lowest class adds


@settings(max_examples=examples(40))
@given(
    chats=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=6),
    n_rows=st.integers(1, 16),
    prompt=st.integers(1, 20),
    factor=st.sampled_from([1, 1.25, 1.5, 3]),
    slots=st.integers(1, 2),
    policy=st.sampled_from(["pipelined", "mixed"]),
)
def test_it_adds_no_more_than_its_budget_and_all_end(
    chats: list[tuple[int, int, int]], n_rows: int, prompt: int, factor: float, slots: int, policy: str
) -> None:
    bench = machine(factor, slots, prefill_policy=policy)
    batch, talks = rows(n_rows, prompt=prompt, max_tokens=12), []
    bench.submit(*batch)
    for arrival, (gap, length, output) in enumerate(chats):
        bench.run(gap)
        talks.append(chat(arrival, output, length))
        bench.submit(talks[-1])
    bench.run()
    assert all(seq.finalized for seq in [*batch, *talks])
    for i in bench.turns():
        if not bench.exempt[i]:
            alone = COSTS.step + COSTS.more(bench.share(i, lowest=False))
            assert COSTS.more(bench.share(i, lowest=True)) <= (factor - 1) * alone + 1e-9


def test_rows_that_do_not_fit_wait_with_their_pages_and_the_best_ranked_go_on() -> None:
    bench = machine(1.25)
    batch = rows(8, max_tokens=60)
    bench.submit(*batch)
    while len(bench.scheduler.state.running) < 8:
        bench.round()
    bench.submit(chat(0, max_tokens=50))
    bench.run(80)
    turns = bench.turns()
    beside = [[seq for seq in bench.plans[i].sequences if seq in batch] for i in turns[FIRST:30]]
    assert beside == [batch[:2]] * len(beside)
    assert bench.budget.held_back == 6
    assert all(seq.allocation is not None for seq in batch if not seq.finalized)
    bench.run()
    assert bench.scheduler.state.counters.preemptions == 0
    assert all(seq.finalized for seq in batch)


def test_its_chunks_run_beside_the_decodes_and_are_cut_to_what_fits() -> None:
    bench = machine(1.25)
    bench.submit(chat(0, max_tokens=40))
    bench.run(12)
    [row] = rows(1, prompt=30)
    bench.submit(row)
    bench.run(30)
    chunks = [(plan, i) for i, plan in enumerate(bench.plans) if row in plan.chunks]
    assert {plan.kind for plan, _ in chunks} == {"mixed"}
    assert len(chunks) > 1
    assert all(int(bench.batches[i].lengths[-1]) < CHUNK for _, i in chunks)


@pytest.mark.parametrize("n_pages", [78, 80])
def test_a_chunk_leaves_the_decodes_beside_it_their_pages(n_pages: int) -> None:
    """With as few pages as these, the last chunk alone takes what is left."""
    bench = machine(1.15, n_pages=n_pages, prefix_cache="off")
    talk, [row] = chat(0, max_tokens=60), rows(1, prompt=50, max_tokens=4)
    bench.submit(talk)
    bench.run(6)
    bench.submit(row)
    bench.run()
    ends = [one.end for one in bench.scheduler.state.emissions if isinstance(one, SequenceEnded)]
    assert [type(end) for end in ends] == [Finish, Finish]


def test_without_a_more_urgent_sequence_there_is_no_limit() -> None:
    bench, free = machine(1), machine("off")
    for one in (bench, free):
        one.submit(*rows(8, prompt=12))
        one.run()
    assert [plan.kind for plan in bench.plans] == [plan.kind for plan in free.plans]
    assert not any(bench.limited)


def test_steps_without_the_class_are_measured_now_and_then_between_others_of_the_kind() -> None:
    bench = machine(1000, max_num_seqs=16)
    measured = bench.times.measured
    batch = rows(8, max_tokens=60)
    bench.submit(*batch)
    for arrival in range(2):
        last = chat(arrival, max_tokens=50)
        bench.submit(last)
        while not last.finalized:
            bench.round()
    bench.run()
    turns = [BATCH in priorities(bench.plans[i].sequences) for i in bench.turns()]
    assert turns[:FIRST] == [False] * FIRST
    apart = [turn for turn, shared in enumerate(turns[FIRST : PROBED + 8], FIRST) if not shared]
    assert apart == [PROBED + k for k in range(PROBES)]
    assert sum(load.rows == 1 for load in measured) == FIRST - 2 + PROBES - 2


def test_however_little_fits_the_class_goes_on() -> None:
    """With a factor of 1 nothing ever fits, and one chat follows the other."""
    bench = machine(1)
    batch = rows(2, max_tokens=3, prompt=12)
    for arrival in range(8):
        last = chat(arrival, max_tokens=50)
        bench.submit(last, *(batch if arrival == 0 else ()))
        while not last.finalized:
            bench.round()
    bench.run()
    turns = bench.turns()
    shared = [turn for turn, i in enumerate(turns) if BATCH in priorities(bench.plans[i].sequences)]
    assert shared
    assert all(b - a > EXEMPT for a, b in pairwise([-1, *shared]))


def test_a_class_that_goes_on_within_its_budget_has_it_in_every_step() -> None:
    bench = machine(1.25)
    for arrival in range(8):
        last = chat(arrival, max_tokens=50)
        bench.submit(last, *rows(1, 100 + 10 * arrival, max_tokens=40))
        while not last.finalized:
            bench.round()
    turns = bench.turns()
    assert len(turns) > EXEMPT
    assert not any(bench.exempt[i] for i in turns)


def test_a_step_is_not_estimated_to_be_much_wider_than_any_before() -> None:
    bench = machine(100)
    bench.budget.times = KnownTimes(COSTS, widest=1)
    bench.submit(chat(0, max_tokens=20), *rows(8, max_tokens=40))
    bench.run(40)
    assert max(bench.share(i, lowest=True).positions for i in bench.turns()) == 2


# ---------------------------------------------------------------- a chat that arrives


@settings(max_examples=examples(40))
@given(
    n_rows=st.integers(1, 8),
    prompt=st.integers(1, 30),
    before=st.integers(0, 40),
    factor=st.sampled_from(["off", 1.25]),
    length=st.integers(1, CHUNK),
)
def test_a_chat_waits_for_at_most_the_two_steps_in_flight(
    n_rows: int, prompt: int, before: int, factor: float | str, length: int
) -> None:
    """Beside rows that fill the engine, what is in flight included; and no chunk of theirs shares its step."""
    bench = machine(factor, max_num_seqs=4)
    bench.submit(*rows(n_rows, prompt=prompt, max_tokens=20))
    bench.run(before)
    begun = len(bench.plans) - bench.pipeline.in_flight
    late = chat(0, max_tokens=4, prompt=length)
    bench.submit(late)
    while late not in (bench.plans[-1].sequences if bench.plans else ()):
        bench.round()
    waited = bench.plans[begun:-1]
    assert sum(plan.n_chunks > 0 for plan in waited) <= 1
    assert len(waited) <= 2  # those in flight
    assert priorities(bench.plans[-1].chunks) == {CHAT}
    bench.run()


def test_a_chat_that_has_a_place_starts_before_rows_decode_again() -> None:
    """Although the step before its own held prompts alone."""
    bench = machine("off", max_num_seqs=12)
    bench.submit(*rows(4))
    while len(bench.scheduler.state.running) < 4:
        bench.round()
    bench.run(4)
    bench.submit(*rows(1, arrival=200))
    while not bench.plans[-1].n_chunks:
        bench.round()
    late = chat(0, max_tokens=4)
    bench.submit(late)
    while bench.pipeline.is_full or not bench.launch():
        bench.commit()
    assert [plan.kind for plan in bench.plans[-2:]] == ["prefill", "prefill"]
    assert bench.plans[-1].chunks == [late]
    bench.run()


def test_two_prompts_of_rows_in_a_row_never_keep_rows_from_decoding() -> None:
    bench = machine("off", max_num_seqs=12)
    bench.submit(*rows(4))
    while len(bench.scheduler.state.running) < 4:
        bench.round()
    bench.submit(*rows(6, arrival=200, prompt=20))
    bench.run()
    kinds = [plan.kind for plan in bench.plans[2:]]
    assert "prefill" in kinds
    assert ("prefill", "prefill") not in set(pairwise(kinds))


# ---------------------------------------------------------------- a chat was here lately


def test_prompts_of_rows_fill_their_steps_again_once_no_chat_has_come_for_a_while() -> None:
    bench = machine("off", max_num_seqs=32, chunk_size=16, max_num_batched_tokens=16, prefix_cache="off")
    now = [0.0]
    bench.now = lambda: now[0]

    def widest(arrival: int) -> int:
        begun = len(bench.plans)
        bench.submit(*rows(8, arrival, max_tokens=2))
        bench.run()
        return max(len(plan.chunks) for plan in bench.plans[begun:])

    assert widest(100) == 8
    bench.submit(chat(0, max_tokens=4), *rows(1, 200))
    bench.run()
    assert widest(300) == 1
    now[0] = RECENT_S + 1
    assert widest(400) == 8


def test_chats_fill_their_steps_whatever_rows_there_were() -> None:
    lately = RecentDemand()
    lately.see(CHAT, BATCH, now=0.0)
    assert lately.most(CHAT, 512, 512, now=1.0) == 512
    assert lately.most(BATCH, 512, 512, now=1.0) == 512 // PART
    lately.see(CHAT, CHAT, now=2.0)
    assert lately.most(CHAT, 2048, 512, now=3.0) == 2048


def test_a_chat_takes_the_place_of_a_row_at_once_and_the_row_comes_back_through_the_cache() -> None:
    bench = machine("off", max_num_seqs=4)
    batch = rows(4, prompt=6)
    bench.submit(*batch)
    bench.run(20)
    late, worst = chat(0, max_tokens=4), batch[-1]
    kept = worst.kv_position
    bench.submit(late)
    while bench.pipeline.is_full:
        bench.round()
    bench.round()
    assert worst.preempting or worst.allocation is None
    assert not any(seq.preempting for seq in batch[:-1])
    while worst not in bench.scheduler.state.active or worst.preempting:
        bench.round()
    assert late.finalized
    assert worst.reused >= kept
    bench.run()
    assert bench.scheduler.state.counters.preemptions == 1


def test_a_chat_goes_before_a_row_whose_prompt_is_begun() -> None:
    bench = machine("off", max_num_seqs=12)
    bench.submit(*rows(1, prompt=20))
    bench.launch()
    late = chat(0)
    bench.submit(late)
    while not bench.launch():
        bench.commit()
    assert bench.plans[-1].chunks == [late]
    bench.run()


def test_prompts_of_two_priorities_share_no_step() -> None:
    bench = machine("off")
    bench.submit(*rows(2), chat(0), chat(1))
    bench.run()
    assert all(len(priorities(plan.chunks)) <= 1 for plan in bench.plans)
    assert len(bench.plans[0].chunks) == 2


@pytest.mark.parametrize(("factor", "more"), [(0.5, {}), (float("nan"), {}), (1.25, {"prefill_policy": "drain"})])
def test_a_budget_that_is_none_is_refused(factor: float, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="batch_step_budget: must be off"):
        EngineConfig(batch_step_budget=factor, **more)
