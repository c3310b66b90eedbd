"""Short prompts beside long ones: who waits for whose chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from tests.support.stepped import Bench, sequence
from tests.support.trials import examples

CHUNK = 8


def machine(slots: int = 2, **config: object) -> Bench:
    settings = {"chunk_size": CHUNK, "max_num_batched_tokens": 2 * CHUNK, "prefix_cache": "off", **config}
    return Bench(slots=slots, **settings)


def prefills(bench: Bench) -> list[StepPlan]:
    return [plan for plan in bench.plans if plan.n_chunks]


def chunks_waited_for(bench: Bench, short: ScheduledSequence, long: ScheduledSequence, begun: int) -> int:
    """Chunks of `long` launched from step `begun` on, up to and with the step in which `short` is prefilled."""
    own = next(i for i, plan in enumerate(bench.plans) if short in plan.chunks)
    return sum(long in plan.chunks for plan in bench.plans[begun : own + 1])


@settings(max_examples=examples(100))
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=CHUNK),
    slots=st.integers(1, 2),
    policy=st.sampled_from(["pipelined", "drain", "mixed"]),
)
def test_a_short_prompt_waits_for_one_chunk_of_a_long_one(
    arrivals: list[tuple[int, int]], slots: int, policy: str
) -> None:
    """`arrivals`: rounds since the one before, and output tokens. What is in flight is waited for too. `mixed` has
    a chunk in each of the steps in flight, and one beside the short prompt."""
    most = slots + 1 if policy == "mixed" else 1
    bench = machine(slots, max_num_seqs=16, prefill_policy=policy)
    long = sequence([9] * 60, 0, 2)
    bench.submit(long)
    bench.round()
    shorts = []
    for i, (gap, output) in enumerate(arrivals):
        for _ in range(gap):
            if bench.has_work:
                bench.round()
        shorts.append((sequence([1], 1 + i, output), len(bench.plans) - bench.pipeline.in_flight))
        bench.submit(shorts[-1][0])
    while bench.has_work:
        bench.round()
    assert max([chunks_waited_for(bench, short, long, begun) for short, begun in shorts], default=0) <= most


@settings(max_examples=examples(100))
@given(
    running=st.lists(st.integers(4, 12), min_size=1, max_size=6),
    before=st.integers(1, 12),
    slots=st.integers(1, 2),
    policy=st.sampled_from(["pipelined", "drain", "mixed"]),
)
def test_a_prefill_waits_for_at_most_two_decode_completions(
    running: list[int], before: int, slots: int, policy: str
) -> None:
    """`running`: output tokens of the sequences that decode; the prompt comes after `before` half rounds. It waits
    for what is in flight when it arrives, and no decode is launched ahead of it that need not be."""
    bench = machine(slots, max_num_seqs=16, prefill_policy=policy)
    bench.submit(*(sequence([2], i, output) for i, output in enumerate(running)))
    for _ in range(before):
        if bench.has_work:
            bench.round()
    late = sequence([1] * CHUNK, 99, 2)
    bench.submit(late)
    completed = 0
    while late not in bench.plans[-1].sequences:
        in_flight = list(bench.pipeline.steps())
        bench.round()
        left = set(map(id, in_flight)) - set(map(id, bench.pipeline.steps()))
        completed += sum(step.kind == "decode" for step in in_flight if id(step) in left)
    assert completed <= 2


@settings(max_examples=examples(50))
@given(
    n=st.integers(CHUNK + 1, 60),
    size=st.integers(1, CHUNK),
    output=st.integers(1, 6),
    slots=st.integers(1, 2),
    policy=st.sampled_from(["pipelined", "mixed"]),
)
def test_a_long_prompt_has_every_second_prefill_step(
    n: int, size: int, output: int, slots: int, policy: str
) -> None:
    """However many short prompts keep coming."""
    bench = machine(slots, max_num_seqs=16, prefill_policy=policy)
    long = sequence([9] * n, 0, 2)
    bench.submit(long)
    for arrival in range(300):
        bench.submit(sequence([1] * size, 1 + arrival, output))
        bench.round()
    assert long.finalized
    steps = [long in plan.sequences for plan in prefills(bench)]
    steps = steps[: len(steps) - steps[::-1].index(True)]
    assert all(a or b for a, b in pairwise(steps))


def test_a_long_prompt_that_waits_is_the_next_to_start_however_many_short_ones_pass() -> None:
    bench = machine(max_num_seqs=3)
    first, second = sequence([8] * 40, 0, 2), sequence([9] * 40, 1, 2)
    bench.submit(first, second)
    for arrival in range(200):
        bench.submit(sequence([1], 2 + arrival, 6))
        bench.round()
    steps = [(first in plan.sequences, second in plan.sequences) for plan in prefills(bench)]
    done = max(i for i, (has_first, _) in enumerate(steps) if has_first)
    assert any(has_second for _, has_second in steps[done : done + 3])
    assert second.finalized


@pytest.mark.parametrize(("rows", "n_long"), [(8, 3), (4, 9)])
def test_short_prompts_pass_waiting_long_ones_as_well(rows: int, n_long: int) -> None:
    bench = machine(max_num_seqs=rows)
    longs = [sequence([7 + i] * 40, i, 2) for i in range(n_long)]
    bench.submit(sequence([1], -1, 50), *longs)
    for _ in range(8):
        bench.round()
    short = sequence([1, 2], n_long)
    bench.submit(short)
    for _ in range(8):
        bench.round()
    assert not short.is_prefilling
    assert longs[0].is_prefilling


def test_short_prompts_pass_no_long_one_of_a_better_priority() -> None:
    bench = machine()
    long, short = sequence([9] * 40, 0, 2), sequence([1], 1, priority=1)
    bench.submit(long)
    bench.round()
    bench.submit(short)
    while bench.has_work:
        bench.round()
    assert all(long in plan.sequences for plan in prefills(bench)[:5]), "it rides beside, and takes no turn"


def test_a_prompt_that_is_mostly_cached_is_short() -> None:
    bench = machine(prefix_cache="radix")
    bench.submit(sequence([5] * 30, 0, 2))
    while bench.has_work:
        bench.round()
    long, turn = sequence([9] * 60, 1, 2), sequence([5] * 30 + [6, 7], 2)
    bench.submit(long)
    bench.round()
    bench.submit(turn)
    while turn.is_prefilling:
        bench.round()
    assert long.is_prefilling
    assert prefills(bench)[-1].lengths == [2]


@settings(max_examples=examples(100))
@given(
    running=st.lists(st.integers(4, 30), min_size=1, max_size=6),
    prompts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=8),
    drafts=st.sampled_from([0, 3]),
)
def test_mixed_steps_hold_everyone_who_can_decode(
    running: list[int], prompts: list[tuple[int, int]], drafts: int
) -> None:
    """Nobody who decodes waits for a chunk, and with chunks of several prompts a step computes no more of them."""
    bench = machine(max_num_seqs=16, prefill_policy="mixed", speculative_tokens=drafts)
    schedule, state = bench.scheduler.schedule_step, bench.scheduler.state

    def watch(pipeline: object) -> StepPlan | None:
        plan = schedule(bench.pipeline)
        if plan is not None and plan.n_chunks and state.running:
            able = {seq for seq in state.running if seq.can_decode and not seq.preempting}
            assert able <= set(plan.sequences)
            assert plan.lengths is not None
            assert sum(plan.lengths[plan.n_decodes :]) <= CHUNK
        return plan

    bench.scheduler.schedule_step = watch  # type: ignore[method-assign]
    bench.submit(*(sequence([2], i, output) for i, output in enumerate(running)))
    for i, (gap, size) in enumerate(prompts):
        for _ in range(gap):
            if bench.has_work:
                bench.round()
        bench.submit(sequence([3] * size, 100 + i, 4))
    while bench.has_work:
        bench.round()


def test_a_long_prompt_that_is_mixed_in_has_a_chunk_in_every_step() -> None:
    bench = machine(max_num_seqs=4, prefill_policy="mixed")
    bench.submit(sequence([2], 0, 50))
    bench.round()
    long = sequence([9] * 5 * CHUNK, 1, 2)
    bench.submit(long)
    while long.is_prefilling:
        bench.round()
    assert [plan.kind for plan in prefills(bench)] == ["prefill", *["mixed"] * 5]
    first = bench.plans.index(prefills(bench)[1])
    assert bench.plans[first : first + 5] == prefills(bench)[1:]
