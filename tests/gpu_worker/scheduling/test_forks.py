"""Forks of running sequences, and rows that computed what another published first."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from petiole.gpu_worker import FinishReason, Request, SamplingParams
from petiole.gpu_worker.request.prepared_images import IMAGE, RequestImage
from petiole.gpu_worker.scheduling.priorities import admission
from petiole.gpu_worker.scheduling.priorities.admission import forked
from petiole.gpu_worker.scheduling.scheduled_sequence import Arrival, ScheduledSequence, SequenceInputs
from petiole.gpu_worker.scheduling.stopping import Finish, StopRules
from tests.support.stepped import Bench, sequence
from tests.support.trials import examples

RUN = 4
ANSWER = 7  # every token that the runtime makes


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RUN_TOKENS", RUN)


def decoding(bench: Bench, *sequences: ScheduledSequence, committed: int) -> None:
    """Submit them and go on until each has committed so many positions."""
    bench.submit(*sequences)
    while any(seq.kv_position < committed for seq in sequences):
        bench.round()


def until_started(bench: Bench, seq: ScheduledSequence) -> None:
    while seq.scheduled_s is None:
        bench.round()


# ---------------------------------------------------------------- the decision


def test_who_begins_with_a_run_that_another_has_committed_is_its_fork() -> None:
    bench, running = Bench(), sequence([1, 2, 3], max_tokens=40)
    decoding(bench, running, committed=3 + RUN)

    def is_fork(prompt: list[int], **request: Any) -> bool:
        return forked(sequence(prompt, 1, **request), [running], n_cached=3) == [running]

    assert is_fork([1, 2, 3] + [ANSWER] * RUN)
    assert is_fork([1, 2, 3] + [ANSWER] * RUN + [9, 9])
    assert not is_fork([1, 2, 3] + [ANSWER] * (RUN - 1) + [9, 9]), "less than a run"
    assert not is_fork([1, 2, 4] + [ANSWER] * RUN), "another prompt"
    assert not is_fork([1, 2, 3] + [ANSWER] * RUN, salt="tenant"), "another namespace"
    assert not is_fork([1, 2, 3] + [ANSWER] * RUN, adapter="a"), "another namespace"
    assert not is_fork([1, 2, 3]), "nothing of the answer"


@pytest.mark.parametrize("begin", [0, 1, 5])
@pytest.mark.parametrize("n_images", [1, 2])
def test_a_run_may_end_anywhere_in_an_image(monkeypatch: pytest.MonkeyPatch, begin: int, n_images: int) -> None:
    def with_images(last: int, arrival: int) -> ScheduledSequence:
        images = {begin + 9 * k: RequestImage(content_hash=k + last, n_positions=9) for k in range(n_images)}
        ids = [7] * begin + [IMAGE] * (9 * n_images) + [8, 9, 8, 9]
        request = Request(prompt=ids, sampling=SamplingParams(max_tokens=20))
        rules = StopRules.of(request.sampling, frozenset(), len(ids), 64)
        inputs = SequenceInputs(np.array(ids), images=images)
        return ScheduledSequence(request, inputs, rules, arrival=Arrival(arrival))

    running, same, other = with_images(0, 0), with_images(0, 1), with_images(n_images, 2)
    running.generated += [ANSWER] * 3
    running.allocation = mock.Mock(published=0)  # a cache without room took nothing
    running.kv_position = n = len(running.prompt)
    for run in range(1, n + 5):
        monkeypatch.setattr(admission, "RUN_TOKENS", run)
        assert forked(same, [running], 0) == ([running] if run <= n else []), run
        assert forked(other, [running], 0) == ([running] if run <= begin else []), run


def test_positions_in_flight_are_not_forked() -> None:
    bench, running = Bench(), sequence([1, 2, 3], max_tokens=40)
    decoding(bench, running, committed=3 + RUN - 1)
    assert running.scheduled_position > running.kv_position
    fork = sequence([1, 2, 3] + [ANSWER] * (RUN + 2), 1)
    assert forked(fork, [running], n_cached=3) == []


def test_what_is_cached_already_is_not_published_again() -> None:
    bench, running = Bench(), sequence([1, 2, 3], max_tokens=40)
    decoding(bench, running, committed=3 + 2 * RUN)
    fork = sequence([1, 2, 3] + [ANSWER] * (RUN + 1), 1)
    assert forked(fork, [running], n_cached=3 + 2) == []


# ---------------------------------------------------------------- the scheduler


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 1), ("block", 16)])
def test_a_fork_reuses_the_prompt_and_the_answer_so_far(cache: str, page_size: int, slots: int) -> None:
    bench = Bench(slots=slots, prefix_cache=cache, page_size=page_size)
    running = sequence([1, 2, 3], max_tokens=60)
    decoding(bench, running, committed=40)
    fork = sequence([1, 2, 3] + [ANSWER] * 37 + [9], 1)
    bench.submit(fork)
    until_started(bench, fork)
    assert fork.cached_prompt_tokens == 40 // page_size * page_size
    assert not running.finalized
    while bench.has_work:
        bench.round()
    assert bench.scheduler.manager.usage().pages_private == 0


def test_nothing_is_published_for_a_prompt_that_is_no_fork() -> None:
    bench, running = Bench(), sequence([1, 2, 3], max_tokens=60)
    decoding(bench, running, committed=40)
    for at, prompt in enumerate(([1, 2, 3, 4, 5, 6, 7, 8, 9], [5] * 20, [1, 2, 3, ANSWER])):
        bench.submit(sequence(prompt, 1 + at))
    assert running.published == 3


def test_equal_prompts_of_one_step_keep_one_copy_once_they_are_committed() -> None:
    bench = Bench()
    shared = list(range(10, 40))
    first, second = sequence([*shared, 1, 2, 3, 4, 5, 6], max_tokens=20), sequence([*shared, *range(50, 82)], 1, 2)
    bench.submit(first, second)
    bench.launch()
    assert len(bench.batches[0].rows) == 2, "both compute the common beginning"
    table = bench.scheduler.manager.table
    free = table.pages_available
    bench.commit()
    assert table.pages_available == free + len(shared)
    assert table.matrix[first.row, :30].tolist() == table.matrix[second.row, :30].tolist()
    bench.launch()
    assert len(bench.batches[-1].pages.rows) > 2, "the device learns of the other pages"


def test_two_rows_with_one_answer_keep_one_copy_after_a_fork() -> None:
    bench = Bench()
    rows = [sequence([1, 2, 3], 0, 60), sequence([1, 2, 3], 1, 60)]
    decoding(bench, *rows, committed=30)
    bench.submit(sequence([1, 2, 3] + [ANSWER] * 27, 2))
    table = bench.scheduler.manager.table
    assert table.matrix[rows[0].row, :30].tolist() == table.matrix[rows[1].row, :30].tolist()


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_forks_at_any_time_reuse_what_their_origin_had_committed(data: st.DataObject) -> None:
    """Against a model of two lines. Every step, `Bench` checks who owns a page, and what the device reads."""
    page_size = data.draw(st.sampled_from([1, 16]))
    bench = Bench(
        slots=data.draw(st.sampled_from([1, 2])),
        prefix_cache="block" if page_size > 1 else data.draw(st.sampled_from(["radix", "block"])),
        page_size=page_size,
        n_pages=1 + data.draw(st.sampled_from([64, 100, 1000])) // page_size,
        prefill_policy=data.draw(st.sampled_from(["pipelined", "drain", "mixed"])),
        chunk_size=data.draw(st.sampled_from([5, 64])),
    )
    state, manager = bench.scheduler.state, bench.scheduler.manager
    for arrival in range(data.draw(st.integers(2, 12))):
        for _ in range(data.draw(st.integers(0, 12))):
            if bench.has_work:
                bench.round()
        origins = [seq for seq in state.running if not seq.preempting]
        if origins and data.draw(st.booleans()):
            origin = data.draw(st.sampled_from(origins))
            n, allocation = data.draw(st.integers(0, origin.kv_position)), origin.allocation
            assert allocation is not None
            more = data.draw(st.lists(st.sampled_from([1, ANSWER]), min_size=n == 0, max_size=3))
            fork = sequence([*origin.tokens(0, n).tolist(), *more], arrival, 30)
            missed = fork.prefill_target - manager.match_length(fork.cache_tokens, fork.namespace)
            publishes = n >= origin.published + RUN and missed >= RUN and not allocation.stale
            bench.submit(fork)
            if publishes:
                whole = min(n, fork.prefill_target - 1) // page_size * page_size
                assert manager.match_length(fork.cache_tokens, fork.namespace) >= whole
        else:
            bench.submit(
                sequence(data.draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=20)), arrival, 30)
            )
        if state.active and data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(state.active))
            if data.draw(st.booleans()):
                state.finalize(victim, Finish(FinishReason.CANCELLED))
            elif not victim.preempting:
                state.preempt(victim)
        bench.scheduler.check_invariants(bench.pipeline)
    while bench.has_work:
        bench.round()
    assert manager.usage().pages_private == 0
