"""The scheduler's verbs without an engine: a runtime that answers at once, no threads, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from petiole.cache import PageTable
from petiole.gpu_worker import AdapterError, FinishReason, SamplingParams
from petiole.gpu_worker.runtime.interface import PENDING
from petiole.gpu_worker.scheduling.batching import page_updates
from petiole.gpu_worker.scheduling.priorities.admission import ResidentAdapters, WaitingQueue, can_reuse
from petiole.gpu_worker.scheduling.state import Extras, SequenceEnded
from petiole.gpu_worker.scheduling.stopping import Finish, StopRules
from tests.support.stepped import Bench, sequence
from tests.support.toy_engine import BoldProposer

# ---------------------------------------------------------------- the verbs


def test_numbers_are_kept_by_the_position_of_their_token() -> None:
    seq = sequence([1, 2, 3])
    for token, numbers in ((5, (7,)), (1, ()), (6, (8, 9))):
        seq.generated.append(token)
        kept = Extras(None, [numbers, (0,)], [tuple(map(float, numbers)), (0.0,)]).keep(seq, 1)
        assert (kept.numbers, kept.values) == ([numbers], [tuple(map(float, numbers))])
    assert seq.numbers == {3: (7,), 5: (8, 9)}


def test_planning_a_decode_changes_nothing() -> None:
    bench = Bench()
    seq = sequence([1, 2, 3])
    bench.submit(seq)
    bench.launch()
    before = (seq.scheduled_position, seq.inflight_refs, bench.scheduler.manager.usage())
    for _ in range(3):
        plan = bench.scheduler.schedule_decode_step(bench.pipeline)
        assert plan is not None
        assert plan.sequences == [seq]
    assert (seq.scheduled_position, seq.inflight_refs, bench.scheduler.manager.usage()) == before


def test_gpu_progress_moves_at_launch_and_committed_progress_at_commit() -> None:
    bench = Bench()
    seq = sequence([1, 2, 3])
    bench.submit(seq)
    assert [bench.launch(), bench.launch()] == ["prefill", "decode"]
    assert (seq.scheduled_position, seq.kv_position, seq.generated) == (4, 0, [])
    bench.commit()
    assert (seq.scheduled_position, seq.kv_position, seq.generated) == (4, 3, [7])
    bench.commit()
    assert (seq.kv_position, seq.generated) == (4, [7, 7])


def test_a_decode_feeds_the_pending_input_and_sends_only_its_new_page() -> None:
    bench = Bench()
    bench.submit(sequence([1, 2, 3]), sequence([9, 9], 1))
    bench.launch()
    bench.launch()
    prefill, decode = bench.batches
    assert prefill.token_ids.tolist() == [1, 2, 3, 9, 9]
    assert (prefill.starts.tolist(), prefill.lengths.tolist(), prefill.outputs.tolist()) == (
        [0, 0],
        [3, 2],
        [1, 1],
    )
    assert [binding.row for binding in prefill.bindings] == prefill.rows.tolist()
    assert len(prefill.pages.rows) == 5
    assert decode.token_ids.tolist() == [PENDING, PENDING]
    assert decode.starts.tolist() == [3, 2]
    assert (decode.bindings, decode.pages.columns.tolist()) == ([], [3, 2])


def test_a_sequence_at_its_budget_is_not_planned_again() -> None:
    bench = Bench()
    seq = sequence([1], max_tokens=2)
    bench.submit(seq)
    assert [bench.launch(), bench.launch()] == ["prefill", "decode"]
    bench.commit()
    assert bench.scheduler.schedule_decode_step(bench.pipeline) is None
    bench.commit()
    assert bench.scheduler.state.emissions[-1] == SequenceEnded(seq, Finish(FinishReason.LENGTH, "max_tokens"))
    assert bench.scheduler.state.num_allocated == 0


def test_rows_give_up_their_drafts_before_one_waits_for_pages() -> None:
    """10 pages are free: enough for one row with 5 drafts, or for both without any."""
    bench = Bench(n_pages=1 + 34, slots=1, speculative_tokens=5, prefix_cache="off")
    rows = [sequence([n] * 12, n, max_tokens=20) for n in (1, 2)]
    for seq in rows:
        seq.drafter = BoldProposer().drafter([5, 7, 8, 5, 7, 8, 5])
    bench.submit(*rows)
    assert bench.launch() == "prefill"
    bench.commit()
    assert bench.launch() == "decode"
    assert bench.plans[-1].sequences == rows


def test_a_recompute_writes_the_known_tail_and_samples_nothing() -> None:
    bench = Bench(prefix_cache="off")
    seq = sequence([1, 2, 3], resume_token_ids=[4, 5])
    bench.submit(seq)
    bench.launch()
    (batch,) = bench.batches
    assert batch.token_ids.tolist() == [1, 2, 3, 4]
    assert (batch.outputs.tolist(), batch.pending.tolist()) == ([0], [5])
    assert batch.bindings[0].output_token_ids.tolist() == [4, 5]


def test_prefill_and_decode_take_turns_while_streams_run() -> None:
    bench = Bench(chunk_size=2)
    bench.submit(sequence([1], max_tokens=40))
    kinds = [bench.launch(), bench.launch()]
    bench.submit(sequence([2] * 9, 1))
    for _ in range(8):
        bench.commit()
        kinds.append(bench.launch())
    assert kinds == ["prefill", "decode"] + ["prefill", "decode"] * 4


def test_an_empty_pipeline_prefills_the_whole_budget_and_streams_only_a_chunk() -> None:
    bench = Bench(chunk_size=4, max_num_batched_tokens=10)
    bench.submit(*(sequence([10 + i] * 4, i) for i in range(4)))
    bench.launch()
    assert bench.batches[0].lengths.tolist() == [4, 4, 2]
    bench.launch()
    bench.commit()
    bench.launch()
    assert int(bench.batches[2].lengths.sum()) <= 4


def test_an_equal_prompt_waits_for_the_chunks_that_another_computes() -> None:
    bench = Bench(chunk_size=4)
    first, second = sequence([5] * 12), sequence([5] * 12, 1)
    bench.submit(first, second)
    for _ in range(3):
        assert bench.launch() == "prefill"
        assert bench.scheduler.state.prefilling != [second]
        bench.commit()
    assert bench.launch() in ("decode", "prefill")
    bench.launch()
    assert second.cached_prompt_tokens == 11


def test_a_short_common_beginning_does_not_make_anybody_wait() -> None:
    bench = Bench()
    bench.submit(sequence([1, 2, 3, 4, 5, 6]), sequence([1, 9, 9, 9, 9, 9], 1))
    bench.launch()
    assert len(bench.batches[0].rows) == 2


def test_reclaimed_pages_reach_the_device_again() -> None:
    bench = Bench(n_pages=14, prefix_cache="radix")
    bench.submit(sequence([1] * 6, max_tokens=4))
    while bench.launch() or not bench.pipeline.is_empty:
        bench.commit()
    bench.submit(sequence([2] * 8, 1, max_tokens=4))
    bench.launch()
    batch = bench.batches[-1]
    matrix = bench.scheduler.manager.table.matrix
    assert batch.pages.pages.tolist() == matrix[batch.rows[0], :8].tolist()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 4, 16]), n=st.integers(1, 5))
def test_page_updates_cover_each_column_once_over_the_steps_of_a_row(data: Any, size: int, n: int) -> None:
    table = PageTable(1000, size, n + 1, 40)
    rows = np.array([table.allocate() for _ in range(n)], np.int32)
    position = np.zeros(n, np.int32)
    seen: set[tuple[int, int]] = set()
    for step in range(5):
        lengths = np.array([data.draw(st.integers(1, 7)) for _ in range(n)], np.int32)
        table.reserve_many(rows, position + lengths)
        bound = rows if step == 0 else rows[:0]
        updates = page_updates(table, rows, position, lengths, bound)
        entries = list(zip(updates.rows.tolist(), updates.columns.tolist(), strict=True))
        assert not seen & set(entries)
        seen |= set(entries)
        assert updates.pages.tolist() == [int(table.matrix[entry]) for entry in entries]
        position = position + lengths
    assert seen == {(int(r), c) for r, p in zip(rows, position, strict=True) for c in range(-(-int(p) // size))}


# ---------------------------------------------------------------- admission


def test_the_waiting_queue_goes_by_priority_and_then_by_arrival() -> None:
    queue = WaitingQueue()
    sequences = [sequence([1], arrival, priority=priority) for arrival, priority in enumerate([1, 0, 1, -1])]
    for seq in sequences:
        queue.push(seq)
    assert list(queue) == [sequences[i] for i in (3, 1, 0, 2)]
    queue.remove(sequences[1])
    assert queue.first() is sequences[3]
    assert len(queue) == 3
    for seq in queue:
        queue.remove(seq)
    assert not len(queue)


def test_a_request_without_an_adapter_passes_as_many_as_wait_for_a_slot() -> None:
    bench = Bench(max_num_seqs=2, lora_slots=1)
    bench.submit(sequence([1], 0, 40, adapter="a"), *(sequence([2], 1 + i, adapter="b") for i in range(5)))
    free = sequence([3], 9)
    bench.submit(free)
    while not free.finalized:
        bench.round()
    assert bench.scheduler.state.num_allocated, "the slot is still held"


def test_who_waits_for_an_adapter_does_not_drain_the_pipeline() -> None:
    bench = Bench(lora_slots=1, prefill_policy="drain")
    bench.submit(sequence([1, 2], arrival=0, adapter="a"))
    assert bench.launch() == "prefill"
    bench.commit()
    bench.submit(sequence([3, 4], arrival=1, adapter="b"))
    assert [bench.launch(), bench.launch()] == ["decode", "decode"]


@given(
    a=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    b=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    n=st.integers(1, 12),
)
def test_what_is_alike_from_the_start_can_be_reused(a: list[int], b: list[int], n: int) -> None:
    n = min(n, len(a))
    assert can_reuse(sequence(a), sequence(b), n) == (a[:n] == b[:n])
    assert not can_reuse(sequence(a), sequence(b, salt="x"), n)


@pytest.mark.parametrize(("alike", "waits"), [(3, False), (4, False), (5, True), (7, True)])
def test_who_can_reuse_half_of_its_prompt_or_more_waits(alike: int, waits: bool) -> None:
    bench = Bench(chunk_size=2, max_num_batched_tokens=16)
    bench.submit(sequence([9] * 10, arrival=0), sequence([9] * alike + [3] * (10 - alike), arrival=1))
    assert bench.launch() == "prefill"
    assert len(bench.plans[0].sequences) == 1 + (not waits)


# ---------------------------------------------------------------- stopping


def rules(**sampling: Any) -> StopRules:
    return StopRules.of(SamplingParams(**{"max_tokens": 10, **sampling}), frozenset({0}), 4, 20)


@pytest.mark.parametrize(
    ("stop", "before", "fresh", "taken", "reason"),
    [
        (rules(), [1], [2, 3], 2, None),
        (rules(), [1], [2, 0, 3], 2, "eos"),
        (rules(ignore_eos=True), [1], [2, 0, 3], 3, None),
        (rules(stop_token_ids=[3]), [], [2, 3, 4], 2, 3),
        (rules(stop_token_sequences=[[2, 3]]), [1, 2], [3, 4], 1, "[2, 3]"),
        (rules(stop_token_sequences=[[9, 9], [2, 3]]), [], [2, 3, 9, 9], 2, "[2, 3]"),
        (rules(stop_token_sequences=[[1, 0]]), [1], [0], 1, "[1, 0]"),
        (rules(stop_token_sequences=[[2, 3]], min_tokens=4), [1, 2], [3, 4], 2, None),
        (rules(stop_token_sequences=[[2, 3]], min_tokens=4), [1, 2], [3, 2, 3, 4], 3, "[2, 3]"),
        (rules(stop_token_sequences=[[2, 3]], min_tokens=4), [1, 1, 1, 2], [3], 1, "[2, 3]"),
        (rules(max_tokens=3, min_tokens=3), [1, 1], [1, 0], 1, "max_tokens"),
        (rules(max_tokens=3), [1, 1], [1, 0], 1, "max_tokens"),
        (rules(max_tokens=3), [1, 1], [0], 1, "eos"),
        (rules(max_tokens=16), [1] * 15, [1], 1, "max_tokens"),
        (rules(max_tokens=17), [1] * 15, [1], 1, "max_model_len"),
    ],
)
def test_the_first_token_that_ends_it_ends_it(
    stop: StopRules, before: list[int], fresh: list[int], taken: int, reason: str | int | None
) -> None:
    count, finish = stop.cut(before, fresh)
    assert (count, None if finish is None else finish.stop_reason) == (taken, reason)


# ---------------------------------------------------------------- adapters


def test_adapter_slots_are_shared_held_and_reused_least_recently_used_first() -> None:
    loaded: list[tuple[str, int]] = []
    slots = ResidentAdapters(2, lambda adapter, slot: loaded.append((adapter, slot)))
    assert [slots.acquire(k, k) for k in ("a", "b", "a")] == [1, 2, 1]
    assert slots.acquire("c", "c") is None, "both slots are held"
    slots.release("b")
    assert slots.acquire("c", "c") == 2
    slots.release("c")
    slots.release("a")
    slots.release("a")
    assert slots.acquire("c", "c") == 2, "still there"
    assert loaded == [("a", 1), ("b", 2), ("c", 2)]
    with pytest.raises(AssertionError):
        slots.release("a")


def test_an_adapter_whose_content_changed_is_loaded_again() -> None:
    loaded: list[int] = []
    slots = ResidentAdapters(2, lambda adapter, slot: loaded.append(slot))
    assert slots.acquire("hash 1", "folder") != slots.acquire("hash 2", "folder")
    assert loaded == [1, 2]


def test_no_adapter_needs_no_slot_and_any_adapter_needs_one() -> None:
    slots = ResidentAdapters(0, lambda *_: None)
    assert slots.acquire(None, None) == 0
    with pytest.raises(AdapterError):
        slots.acquire("a", "a")
