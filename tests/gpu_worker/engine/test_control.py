"""Cancel in every state, deadlines, pause, reload, shutdown, handback, heartbeat."""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import Any

import pytest

from petiole.gpu_worker import (
    Constraint,
    Engine,
    EngineBusy,
    EngineClosed,
    FinishReason,
    HandedBack,
    InvalidRequest,
    ModelError,
    Request,
)
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.runtime.interface import LoadWeights, Progress, nothing
from tests.support.toy_engine import VOCAB, Expected, Watch, expected, request, toy_engine
from tests.support.toy_runtime import ToyRuntime
from tests.support.toy_text import LETTERS

LONG = request([1, 2, 3], 90, ignore_eos=True)


def slow() -> None:
    time.sleep(0.001)


def running(engine: Engine, n_deltas: int = 2) -> Handle:
    """A long request that has begun to stream."""
    handle = engine.submit(LONG)
    for _, _ in zip(range(n_deltas), handle, strict=False):
        pass
    return handle


def submit_all(engine: Engine, requests: list[Request]) -> list[Handle]:
    """They all wait when the first of them starts."""
    engine.pause()
    handles = [engine.submit(r) for r in requests]
    while engine.stats()["waiting"] != len(handles):
        engine._call(lambda: None)
    engine.resume()
    return handles


def released(engine: Engine) -> bool:
    while engine.stats()["rows_held"]:
        engine._call(lambda: None)
    engine.check_invariants()
    return engine.stats()["pages_private"] == 0


# ---------------------------------------------------------------- cancel


def test_cancel_while_waiting() -> None:
    with toy_engine(max_num_seqs=1, jitter=slow) as engine:
        first = running(engine)
        second = engine.submit(request([4, 5]))
        second.cancel()
        result = second.result(timeout=30)
        assert (result.finish_reason, result.token_ids, result.timing.ttft_ms) == (
            FinishReason.CANCELLED,
            (),
            None,
        )
        first.cancel()


def test_cancel_while_running_gives_what_there_is_and_frees_the_row() -> None:
    with toy_engine(jitter=slow) as engine:
        handle = running(engine)
        handle.cancel()
        result = handle.result(timeout=30)
        assert result.finish_reason is FinishReason.CANCELLED
        assert 2 <= len(result.token_ids) < 90
        assert result.token_ids == expected(LONG).token_ids[: len(result.token_ids)]
        assert released(engine)


def test_a_cancel_lets_out_the_letter_that_completes_a_stop_string() -> None:
    """Undisturbed, the letter is held back until the next token, and that one belongs to the output."""
    tokens = expected(LONG).token_ids
    held = next(k for k in range(2, len(tokens)) if tokens[k] % 3 == 2 and tokens[k] not in tokens[:k])
    asked = request([1, 2, 3], 90, ignore_eos=True, stop=[LETTERS[tokens[held]]])
    assert len(expected(asked).token_ids) == held + 2
    reached, go_on, steps = threading.Event(), threading.Event(), count()
    with toy_engine(pipeline="off") as engine:
        launch = engine.scheduler.runtime.launch_forward

        def wait_before_that_token(slot_id: int, batch: Any) -> None:
            if next(steps) == held:
                reached.set()
                go_on.wait(30)
            launch(slot_id, batch)

        engine.scheduler.runtime.launch_forward = wait_before_that_token  # type: ignore[method-assign]
        handle = engine.submit(asked)
        assert reached.wait(30)
        handle.cancel()
        go_on.set()
        result = handle.result(timeout=30)
    got = Expected(result.token_ids, result.text, result.finish_reason, result.stop_reason)
    assert got == expected(asked, cut=held + 1)
    assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, asked.sampling.stop[0])


def test_cancel_in_the_middle_of_a_prefill() -> None:
    with toy_engine(chunk_size=1, jitter=slow) as engine:
        handle = engine.submit(request([1] * 80, 5))
        while not engine.stats()["prefill_steps"]:
            time.sleep(0)
        handle.cancel()
        assert handle.result(timeout=30).finish_reason is FinishReason.CANCELLED
        assert released(engine)


def test_cancel_while_it_is_prepared() -> None:
    engine = toy_engine().start()
    gate = threading.Event()
    engine._intake._preparation.put(gate.wait)
    engine._intake._preparation.put(gate.wait)
    handle = engine.submit(LONG)
    handle.cancel()
    engine._call(lambda: None)
    gate.set()
    assert handle.result(timeout=30).finish_reason is FinishReason.CANCELLED
    engine.shutdown()


def test_a_video_that_takes_long_delays_no_text() -> None:
    engine = toy_engine().start()
    gate = threading.Event()
    engine._intake._videos.put(gate.wait)
    engine._intake._videos.put(gate.wait)
    film = engine.submit(Request(messages=[{"role": "user", "content": [{"type": "video"}]}], images=[b"film"]))
    assert engine.submit(request()).result(timeout=30).finish_reason is FinishReason.LENGTH
    assert not film.done()
    gate.set()
    with pytest.raises(InvalidRequest):
        film.result(timeout=30)
    engine.shutdown()


def test_cancel_after_the_end_and_twice_changes_nothing() -> None:
    with toy_engine(jitter=slow) as engine:
        handle = engine.submit(request())
        result = handle.result()
        handle.cancel()
        handle.hand_back()
        assert handle.result() is result
        again = running(engine)
        again.cancel()
        again.cancel(FinishReason.DEADLINE)
        assert again.result(timeout=30).finish_reason is FinishReason.CANCELLED


def test_cancel_while_paused() -> None:
    with toy_engine(jitter=slow) as engine:
        handle = running(engine)
        engine.pause()
        handle.cancel()
        assert handle.result(timeout=30).finish_reason is FinishReason.CANCELLED
        engine.resume()


# ---------------------------------------------------------------- deadlines


def test_a_deadline_counts_from_admission_and_gives_what_there_is() -> None:
    with toy_engine(jitter=slow) as engine:
        late = request([1, 2, 3], 90, ignore_eos=True, deadline_s=0.03)
        result = engine.generate([late])[0]
        assert result.finish_reason is FinishReason.DEADLINE
        assert 0 < len(result.token_ids) < 90
        assert released(engine)


def test_a_deadline_wakes_a_paused_engine() -> None:
    with toy_engine(jitter=slow) as engine:
        handle = engine.submit(request([1, 2, 3], 90, ignore_eos=True, deadline_s=0.05))
        next(iter(handle))
        engine.pause()
        assert handle.result(timeout=30).finish_reason is FinishReason.DEADLINE
        engine.resume()


# ---------------------------------------------------------------- pause, resume, reload


def test_pause_drains_the_pipeline_and_resume_goes_on_exactly() -> None:
    with toy_engine(jitter=slow) as engine:
        handle = running(engine)
        engine.pause()
        assert engine._loop.pipeline.is_empty
        steps = engine.stats()["steps"]
        other = engine.submit(request([9, 9]))
        while not engine.stats()["waiting"]:
            engine._call(lambda: None)
        assert engine.stats()["steps"] == steps
        engine.resume()
        assert Expected.of(handle.result(timeout=30)) == expected(LONG)
        assert Expected.of(other.result(timeout=30)) == expected(request([9, 9]))


def test_reload_recomputes_what_runs_and_forgets_the_cache() -> None:
    with toy_engine(jitter=slow) as engine:
        before = engine.generate([request()])[0]
        handle = running(engine)
        engine.pause()
        engine.reload("other weights")
        assert engine.stats()["pages_cached"] == 0
        engine.resume()
        result = handle.result(timeout=30)
        assert len(result.token_ids) == 90
        assert result.token_ids != expected(LONG).token_ids, "the rest comes from the new weights"
        assert result.token_ids[:2] == expected(LONG).token_ids[:2], "what was delivered stays"
        after = engine.generate([request()])[0]
        assert after.usage.cached_prompt_tokens == 0
        assert after.token_ids != before.token_ids
        assert released(engine)


def test_a_long_reload_shows_signs_of_life() -> None:
    ages: list[tuple[float, float]] = []

    class Slow(ToyRuntime):
        def prepare_reload(self, model: str) -> LoadWeights:
            def load(progress: Progress = nothing, /) -> None:
                threading.Event().wait(0.05)
                before = engine.heartbeat_age_s()
                progress()
                ages.append((before, engine.heartbeat_age_s()))

            return load

    with toy_engine(runtime=Slow()) as engine:
        engine.reload("slow")
    [(before, after)] = ages
    assert before >= 0.05
    assert after < before


@pytest.mark.parametrize(
    "error", [ModelError("wrong has another shape"), RuntimeError("negative dimension -1"), MemoryError()]
)
def test_a_reload_that_fails_raises_and_the_old_weights_serve_on(error: Exception) -> None:
    class Picky(ToyRuntime):
        def prepare_reload(self, model: str) -> LoadWeights:
            raise error

    with toy_engine(runtime=Picky(jitter=slow)) as engine:
        handle = running(engine)
        with pytest.raises(ModelError, match=f"^(wrong cannot be read: .*)?{error}$"):
            engine.reload("wrong")
        assert Expected.of(handle.result(timeout=30)) == expected(LONG)


def test_cancel_preempt_and_pause_together() -> None:
    """A preempted sequence that is cancelled while the engine is paused leaves nothing behind."""
    paused = threading.Event()
    with toy_engine(machine={"n_pages": 96}, max_num_seqs=4) as engine:
        state = engine.scheduler.state
        preempt = state.preempt

        def pause() -> None:
            engine.pause()
            paused.set()

        def preempt_and_pause(seq: Any) -> None:
            preempt(seq)
            state.preempt = preempt  # type: ignore[method-assign]
            engine._loop.post(pause)

        state.preempt = preempt_and_pause  # type: ignore[method-assign]
        requests = [request([1 + i, 2], 60, ignore_eos=True, request_id=str(i)) for i in range(4)]
        handles = submit_all(engine, requests)
        assert paused.wait(30)
        engine.check_invariants()
        victim = state.waiting.first().output.handle
        victim.cancel()
        assert victim.result(timeout=30).finish_reason is FinishReason.CANCELLED
        engine.check_invariants()
        engine.resume()
        for handle, r in zip(handles, requests, strict=True):
            if handle is not victim:
                assert Expected.of(handle.result(timeout=30)) == expected(r)
        assert released(engine)


def test_a_reload_while_constrained_requests_run_and_wait() -> None:
    class Steady(ToyRuntime):
        def prepare_reload(self, model: str) -> LoadWeights:
            def load(progress: Progress = nothing, /) -> None:
                self.kv[:] = 0  # the same weights: the KV must be computed anew, and nothing else changes

            return load

    found: list[tuple[int, int]] = []
    with toy_engine(runtime=Steady(vocab_size=VOCAB), max_num_seqs=2) as engine:
        state, launch = engine.scheduler.state, engine.runtime.launch_forward

        def reload() -> None:
            found.append((len(state.active), len(state.waiting)))
            engine.reload("the same")

        def launch_and_reload(slot_id: int, batch: Any) -> None:
            launch(slot_id, batch)
            if batch.kind == "decode":
                engine.runtime.launch_forward = launch  # type: ignore[method-assign]
                engine._loop.post(reload)

        engine.runtime.launch_forward = launch_and_reload  # type: ignore[method-assign]
        choice = Constraint("regex", 12)
        requests = [request([1 + i, 2], 30, constraint=choice, request_id=str(i)) for i in range(5)]
        handles = submit_all(engine, requests)
        assert [Expected.of(handle.result(timeout=30)) for handle in handles] == [expected(r) for r in requests]
        assert found == [(2, 3)], "two ran and three waited"
        assert released(engine)


# ---------------------------------------------------------------- shutdown and handback


def test_shutdown_that_drains_still_keeps_deadlines() -> None:
    engine = toy_engine(jitter=slow, max_num_seqs=1).start()
    late = engine.submit(request([1, 2, 3], 90, ignore_eos=True, deadline_s=0.03))
    behind = engine.submit(request([7]))
    engine.shutdown(drain=True)
    assert late.result(timeout=0).finish_reason is FinishReason.DEADLINE
    assert Expected.of(behind.result(timeout=0)) == expected(request([7]))


def test_shutdown_that_drains_a_paused_engine_resumes_it() -> None:
    engine = toy_engine(jitter=slow).start()
    handle = running(engine)
    engine.pause()
    engine.shutdown(drain=True)
    assert Expected.of(handle.result(timeout=0)) == expected(LONG)


def test_shutdown_finishes_what_was_accepted() -> None:
    engine = toy_engine(jitter=slow, max_num_seqs=2).start()
    requests = [request([1 + i], 10, request_id=str(i)) for i in range(6)]
    handles = [engine.submit(r) for r in requests]
    engine.shutdown()
    assert [Expected.of(handle.result(timeout=0)) for handle in handles] == [expected(r) for r in requests]


def test_shutdown_without_drain_cancels() -> None:
    engine = toy_engine(jitter=slow).start()
    handle = running(engine)
    engine.shutdown(drain=False)
    assert handle.result(timeout=0).finish_reason is FinishReason.CANCELLED


def test_what_is_handed_back_before_a_shutdown_has_everything_committed_delivered() -> None:
    engine = toy_engine(jitter=slow, max_num_seqs=1).start()
    watch = Watch()
    first = engine.submit(LONG, on_delta=watch.on_delta, on_done=watch.on_done)
    second = engine.submit(request([7]))
    next(iter(first))
    for handle in (first, second):
        handle.hand_back()
    engine.shutdown()
    for handle in (first, second):
        with pytest.raises(HandedBack):
            handle.result(timeout=0)
    sofar = [t for delta in watch.deltas for t in delta.token_ids]
    assert (watch.ends, len(sofar) > 0) == (1, True)
    text = "".join(delta.text for delta in watch.deltas)
    with toy_engine() as successor:
        rest = Watch()
        resumed = request([1, 2, 3], 90, ignore_eos=True, resume_token_ids=sofar)
        result = successor.submit(resumed, on_delta=rest.on_delta).result()
    assert Expected.of(result) == expected(LONG)
    assert text + "".join(delta.text for delta in rest.deltas) == result.text, "the text joins without a seam"


def test_hand_back_of_one_request_leaves_the_others() -> None:
    with toy_engine(jitter=slow) as engine:
        first, second = running(engine), engine.submit(request([7]))
        first.hand_back()
        with pytest.raises(HandedBack):
            first.result(timeout=30)
        assert Expected.of(second.result(timeout=30)) == expected(request([7]))


def test_a_closed_engine_refuses_and_shuts_down_twice() -> None:
    engine = toy_engine()
    with pytest.raises(EngineClosed):
        engine.submit(request()).result(timeout=0)
    engine.shutdown()
    engine.start()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineClosed):
        engine.submit(request()).result(timeout=0)
    with pytest.raises(EngineClosed):
        engine.pause()


def test_a_full_queue_refuses_the_next() -> None:
    with toy_engine(max_num_seqs=1, max_waiting=2) as engine:
        engine.pause()
        handles = [engine.submit(request(request_id=str(i))) for i in range(4)]
        with pytest.raises(EngineBusy):
            handles[3].result(timeout=30)
        engine.resume()
        for handle in handles[:3]:
            handle.result(timeout=30)


# ---------------------------------------------------------------- looking


def test_the_heartbeat_ages_only_while_there_is_work() -> None:
    release = threading.Event()

    class Stuck(ToyRuntime):
        def _forward(self, slot_id: int) -> None:
            release.wait(30)
            super()._forward(slot_id)

    with toy_engine(runtime=Stuck()) as engine:
        while not engine._loop.asleep:
            time.sleep(0)
        assert engine.heartbeat_age_s() == 0.0
        handle = engine.submit(request())
        while engine.heartbeat_age_s() < 0.02:
            time.sleep(0)
        release.set()
        handle.result(timeout=30)
        while not engine._loop.asleep:
            time.sleep(0)
        assert engine.heartbeat_age_s() == 0.0


def test_stats_count_what_happened() -> None:
    with toy_engine() as engine:
        results = engine.generate(
            [request([1 + i, 2, 3], 5, ignore_eos=True, request_id=str(i)) for i in range(3)]
        )
        engine._text.flush()
        stats: dict[str, Any] = engine.stats()
    assert stats["generated_tokens"] == sum(len(r.token_ids) for r in results) == 15
    assert stats["finished"] == 3
    assert (stats["running"], stats["waiting"], stats["open"]) == (0, 0, 0)
    assert stats["prompt_tokens"] == 9
    assert stats["healthy"] == 1
