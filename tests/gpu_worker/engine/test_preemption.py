"""When pages or rows run out: who is left out, who gives way, and that nobody is lost or stuck."""

from __future__ import annotations

import time
from typing import Any

import pytest

from petiole.gpu_worker import Engine, FinishReason, InvalidRequest
from petiole.gpu_worker.scheduling.planning.candidates import PlannedPages
from tests.support.toy_engine import Expected, expected, request, toy_engine

LONG = [
    request([1 + i, 2, 3], 30, ignore_eos=True, temperature=0.6 * (i % 2), request_id=str(i)) for i in range(6)
]


@pytest.mark.parametrize("n_pages", [33, 40, 70, 120])
@pytest.mark.parametrize("cache", ["radix", "block", "off"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_running_out_of_pages_changes_no_token(n_pages: int, cache: str, drafts: int) -> None:
    with toy_engine(machine={"n_pages": n_pages}, prefix_cache=cache, speculative_tokens=drafts) as engine:
        assert [Expected.of(r) for r in engine.generate(LONG)] == [expected(r) for r in LONG]
        engine.check_invariants()
        if n_pages < 100:
            assert engine.stats()["preemptions"]


def test_the_preempted_come_back_through_the_prefix_cache() -> None:
    with toy_engine(machine={"n_pages": 60}) as engine:
        engine.generate(LONG)
        stats = engine.stats()
    assert stats["preemptions"]
    assert int(stats["prefix_hit_tokens"]) > 0


def test_the_worst_rank_gives_way_and_never_an_equal_or_better_one() -> None:
    with toy_engine(machine={"n_pages": 60}) as engine:
        victims: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
        state = engine.scheduler.state
        preempt = state.preempt

        def watch(seq: Any) -> None:
            victims.append((seq.rank, [other.rank for other in state.active]))
            preempt(seq)

        state.preempt = watch  # type: ignore[method-assign]
        requests = [
            request([1 + i, 2, 3], 30, ignore_eos=True, priority=i % 3, request_id=str(i)) for i in range(6)
        ]
        engine.generate(requests)
    assert victims
    assert all(rank == max(ranks) and len(ranks) > 1 for rank, ranks in victims)


def test_a_better_priority_takes_a_row_from_a_worse_one() -> None:
    done: list[str] = []
    with toy_engine(max_num_seqs=1, jitter=lambda: time.sleep(0.001)) as engine:
        slow = engine.submit(
            request([1, 2, 3], 90, ignore_eos=True, priority=5, request_id="slow"),
            on_done=lambda h: done.append("slow"),
        )
        next(iter(slow))
        urgent = engine.submit(request([9], 3, request_id="urgent"), on_done=lambda h: done.append("urgent"))
        assert Expected.of(urgent.result(timeout=30)) == expected(request([9], 3, request_id="urgent"))
        assert len(slow.result(timeout=30).token_ids) == 90
        assert engine.stats()["preemptions"] == 1
    assert done == ["urgent", "slow"]


def test_equal_priorities_do_not_take_rows_from_each_other() -> None:
    with toy_engine(max_num_seqs=1) as engine:
        engine.generate(LONG)
        assert engine.stats()["preemptions"] == 0


def test_full_reserve_never_preempts() -> None:
    with toy_engine(machine={"n_pages": 70}, reserve="full") as engine:
        assert [Expected.of(r) for r in engine.generate(LONG)] == [expected(r) for r in LONG]
        assert engine.stats()["preemptions"] == 0


def test_what_could_not_fit_alone_is_refused_with_what_it_needs_and_what_there_is() -> None:
    with toy_engine(machine={"n_pages": 20}) as engine:
        with pytest.raises(InvalidRequest, match=r"max_tokens: must fit.*: 19 pages.*got 23 pages"):
            engine.generate([request([1, 2, 3, 4], 20)])
        just = request([1, 2, 3, 4], 16, ignore_eos=True)
        assert Expected.of(engine.generate([just])[0]) == expected(just)


def test_the_largest_that_fits_runs_twice_in_a_row_with_its_own_leftovers_in_the_cache() -> None:
    r = request([1, 2, 3, 4, 5, 6], 5, ignore_eos=True)
    with toy_engine(machine={"n_pages": 11}, chunk_size=1) as engine:
        first = engine.generate([r])[0]
        for taken in range(5):
            resumed = request([1, 2, 3, 4, 5, 6], 5, ignore_eos=True, resume_token_ids=first.token_ids[:taken])
            assert engine.submit(resumed).result(timeout=30).token_ids == first.token_ids


def test_zombies_keep_their_rows_until_their_last_step() -> None:
    """Capacity counts rows held. EOS is found at commit, when the next step already holds the sequence."""
    r = request([1, 2, 3], 50)
    stop = expected(request([1, 2, 3], 50, ignore_eos=True)).token_ids[4]
    with toy_engine(max_num_seqs=1, jitter=lambda: time.sleep(0.0005)) as engine:
        held: list[tuple[int, int]] = []
        schedule = engine.scheduler.schedule_step

        def watch(pipeline: Any) -> Any:
            state = engine.scheduler.state
            held.append((state.num_allocated, state.num_zombies))
            return schedule(pipeline)

        engine.scheduler.schedule_step = watch  # type: ignore[method-assign]
        stopped = request([1, 2, 3], 50, ignore_eos=True, stop_token_ids=[stop], request_id="z")
        results = engine.generate([stopped, r])
        zombies = int(engine.stats()["zombie_outputs"])
    assert results[0].finish_reason is FinishReason.STOP
    assert zombies > 0
    assert max(rows for rows, _ in held) == 1
    assert (1, 1) in held, "a zombie is the one that holds the row"


def test_a_stall_would_end_the_request_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_engine() as engine:
        monkeypatch.setattr(PlannedPages, "suffice", lambda *_: False)
        with pytest.raises(Exception, match="cannot be scheduled"):
            engine.submit(request()).result(timeout=30)
        monkeypatch.undo()
        assert _serves(engine)


def _serves(engine: Engine) -> bool:
    return Expected.of(engine.generate([request()])[0]) == expected(request())
