"""Urgent sequences behind a full machine: who gives way to them, how many, and how soon."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from petiole.gpu_worker.scheduling.planning.relief import Holder, Need, Room, giving_way
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from tests.support.stepped import Bench, sequence
from tests.support.trials import examples

URGENT, BATCH = 0, 9


def full(rows: int, **config: Any) -> tuple[Bench, list[ScheduledSequence]]:
    """A machine all of whose rows decode sequences of priority 9."""
    bench = Bench(**{"max_num_seqs": rows, "max_num_batched_tokens": 512, **config})
    batch = [sequence([100 + i, 1], i, 60, priority=BATCH) for i in range(rows)]
    bench.submit(*batch)
    while len(bench.scheduler.state.running) < rows:
        bench.round()
    return bench, batch


def burst(n: int, size: int = 4, first: int = 1000) -> list[ScheduledSequence]:
    return [sequence([200 + i] * size, first + i, 3, priority=URGENT) for i in range(n)]


class Preempted:
    """Collects the sequences that are preempted: each time, the worst-ranked of those that are not yet."""

    def __init__(self, bench: Bench) -> None:
        self.sequences: list[ScheduledSequence] = []
        state = bench.scheduler.state
        preempt = state.preempt

        def watch(seq: ScheduledSequence) -> None:
            assert seq.rank == max(other.rank for other in state.active if not other.preempting)
            self.sequences.append(seq)
            preempt(seq)

        state.preempt = watch  # type: ignore[method-assign]


def steps_until_started(bench: Bench, urgent: list[ScheduledSequence]) -> int:
    """Steps launched up to the one with the last prompt of `urgent`."""
    before = len(bench.plans)
    while any(seq.is_prefilling and not seq.finalized for seq in urgent):
        bench.round()
    return len(bench.plans) - before


@pytest.mark.parametrize("policy", ["pipelined", "drain", "mixed"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_burst_starts_as_soon_as_one_urgent_sequence_does(policy: str, slots: int) -> None:
    """With what was in flight committed and at most one more decode step between."""
    steps = []
    for n in (1, 30):
        bench, _ = full(32, slots=slots, prefill_policy=policy)
        urgent = burst(n)
        bench.submit(*urgent)
        steps.append(steps_until_started(bench, urgent))
    assert steps[0] == steps[1] <= 2


@settings(max_examples=examples(200))
@given(
    rows=st.integers(1, 12),
    free=st.integers(0, 3),
    n=st.integers(1, 16),
    size=st.integers(1, 12),
    slots=st.integers(1, 2),
    cache=st.sampled_from(["radix", "off"]),
    policy=st.sampled_from(["pipelined", "drain", "mixed"]),
    chunk=st.sampled_from([4, 16, 512]),
)
def test_no_more_give_way_than_are_needed_and_each_once(
    rows: int, free: int, n: int, size: int, slots: int, cache: str, policy: str, chunk: int
) -> None:
    """Of rows: pages are plenty. Those that give way are the worst-ranked, and come back once for all."""
    bench, batch = full(rows, slots=slots, prefix_cache=cache, prefill_policy=policy, chunk_size=chunk)
    for seq in batch[:free]:
        bench.scheduler.state.finalize(seq, ValueError("cancelled"))
    running = [seq for seq in batch if not seq.finalized]
    seen = Preempted(bench)
    urgent = burst(n, size)
    bench.submit(*urgent)
    steps_until_started(bench, urgent)
    assert len(seen.sequences) <= max(0, min(n, rows) - (rows - len(running)))
    while bench.has_work:
        bench.round()
    assert sorted(seen.sequences, key=lambda seq: seq.rank) == running[len(running) - len(seen.sequences) :]
    assert all(len(seq.generated) == 60 for seq in running)


def test_of_a_burst_of_long_prompts_only_those_that_can_start_take_a_row() -> None:
    """The others' rows go on decoding until it is their turn."""
    bench, _ = full(16, chunk_size=8)
    seen = Preempted(bench)
    bench.submit(*burst(8, size=30))
    for _ in range(4):
        bench.round()
    assert len(seen.sequences) == 1


def test_those_that_share_a_prompt_take_their_rows_when_it_is_computed() -> None:
    bench, _ = full(16)
    seen = Preempted(bench)
    urgent = [sequence([7] * 20 + [i], 1000 + i, 3, priority=URGENT) for i in range(6)]
    bench.submit(*urgent)
    bench.round()
    assert len(seen.sequences) == 1
    steps_until_started(bench, urgent)
    assert len(seen.sequences) == 6
    assert [seq.cached_prompt_tokens for seq in urgent] == [0, *[20] * 5]


def test_a_row_kept_for_an_urgent_sequence_goes_to_no_other() -> None:
    """One that waits for the chunks of an equal prompt is passed over: by equals, not by who would give way."""
    bench = Bench(max_num_seqs=2, chunk_size=4)
    urgent = [sequence([5] * 12, i, 3, priority=URGENT) for i in range(2)]
    bench.submit(*urgent, sequence([9], 2, 60, priority=BATCH))
    seen = Preempted(bench)
    while bench.has_work:
        bench.round()
    assert seen.sequences == []


def test_urgent_sequences_whose_turn_has_not_come_take_no_rows() -> None:
    """Long prompts are prefilled one after the other."""
    bench, _ = full(8, chunk_size=4)
    urgent = burst(3, size=40)
    seen = Preempted(bench)
    bench.submit(*urgent)
    while urgent[0].is_prefilling:
        bench.round()
        assert len(seen.sequences) <= 1


@settings(max_examples=examples(100))
@given(
    n_pages=st.integers(66, 200),
    n=st.integers(1, 8),
    size=st.integers(1, 30),
    slots=st.integers(1, 2),
    cache=st.sampled_from(["radix", "off"]),
)
def test_short_of_pages_everybody_ends_and_urgent_ones_first(
    n_pages: int, n: int, size: int, slots: int, cache: str
) -> None:
    """A sequence gives way only if all that still have a row rank above it."""
    bench = Bench(n_pages, slots=slots, max_num_seqs=8, prefix_cache=cache)
    batch = [sequence([100 + i, 1], i, 40, priority=BATCH) for i in range(6)]
    bench.submit(*batch)
    for _ in range(20):
        bench.round()
    seen = Preempted(bench)
    urgent = burst(n, size)
    bench.submit(*urgent)
    while any(not seq.finalized for seq in urgent):
        bench.round()
    assert not any(seq.finalized for seq in batch if seq in seen.sequences)
    while bench.has_work:
        bench.round()
    assert [len(seq.generated) for seq in (*batch, *urgent)] == [40] * 6 + [3] * n


def test_those_that_would_wait_for_an_adapter_take_no_rows() -> None:
    bench, _ = full(4, lora_slots=2)
    seen = Preempted(bench)
    urgent = [sequence([200 + i], 1000 + i, 3, priority=URGENT, adapter=f"a{i % 3}") for i in range(4)]
    bench.submit(*urgent)
    bench.round()
    assert len(seen.sequences) == 2
    while not all(seq.finalized for seq in urgent):
        bench.round()
    assert len(set(seen.sequences)) == len(seen.sequences)


# ---------------------------------------------------------------- the decision


def held(seq: ScheduledSequence, pages: int, reserved: int = 0) -> Holder:
    seq.allocation = object()  # type: ignore[assignment]
    return Holder(seq, pages, reserved)


@settings(max_examples=examples(300))
@given(
    holders=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 3)), max_size=6),
    waiting=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=4),
    short=st.lists(st.integers(1, 3), max_size=6),
    rows=st.integers(0, 2),
    pages=st.integers(0, 10),
)
def test_the_fewest_give_way_that_let_the_best_ranked_go_on(
    holders: list[tuple[int, int, int]],
    waiting: list[tuple[int, int]],
    short: list[int],
    rows: int,
    pages: int,
) -> None:
    """Against trying every number of victims, worst first."""
    rows_held = [
        held(sequence([1], i, priority=priority), n, reserved) for i, (priority, n, reserved) in enumerate(holders)
    ]
    needs = [Need(holder.seq, lack) for holder, lack in zip(rows_held, short, strict=False)]
    needs += [Need(sequence([1], 100 + i, priority=p), n) for i, (p, n) in enumerate(waiting)]
    reserved = sum(holder.reserved for holder in rows_held)
    chosen = giving_way(needs, rows_held, Room(rows, pages, reserved))

    by_rank = sorted(rows_held, key=lambda holder: holder.seq.rank, reverse=True)
    assert chosen == [holder.seq for holder in by_rank[: len(chosen)]], "the worst-ranked, worst first"
    if not needs:
        assert chosen == []
        return

    def served(n: int) -> list[Need]:
        """Whose needs are met if `n` give way, each without those that outrank it giving way."""
        room = Room(rows, pages, reserved)
        for holder in by_rank[:n]:
            room.release(holder)
        out, starved = [], False
        for need in sorted(needs, key=lambda need: need.seq.rank):
            if any(holder.seq is need.seq for holder in by_rank[:n]) or (need.waits and starved):
                continue
            if room.fits(need):
                room.take(need)
                out.append(need)
            else:
                starved |= need.waits
        return out

    for seq in chosen:
        assert any(need.outranks(seq) for need in served(len(chosen))), f"nobody needs that {seq} gives way"
    for n in range(len(chosen)):
        assert len(served(n)) < len(served(len(chosen))) or served(n) != served(len(chosen)), "one fewer would do"
    best = min(needs, key=lambda need: need.seq.rank)
    below = sum(best.outranks(holder.seq) for holder in rows_held)
    possible = any(best in served(n) for n in range(below + 1))
    assert (best in served(len(chosen))) == possible
