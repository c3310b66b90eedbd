"""Invariants I1 to I8: each holds in the engine, and each is broken on purpose to see that a test would notice.

The check that most of them share: random-looking requests through the pipelined engine must give the oracle's
tokens. Where a violation depends on timing, the device is made slow enough for it to happen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from petiole.cache import ConservationError
from petiole.gpu_worker import Engine, EngineClosed, EngineError, FinishReason
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.device.device import DeviceEvent
from petiole.gpu_worker.runtime.device.transfer import DecodeSlot, RenderBuffer, check_shared_stream
from petiole.gpu_worker.scheduling.outcomes import NotIdle
from petiole.gpu_worker.scheduling.pipeline import LaunchHandle, PendingCommit, PipelineState
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence, SequenceInputs
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.state import SchedulerState, SequenceEnded
from petiole.gpu_worker.scheduling.stopping import Finish
from tests.support.toy_engine import Expected, expected, request, toy_engine
from tests.support.toy_runtime import ToyRuntime

REQUESTS = [
    request([3 + i, 4, 5, 6][: 1 + i % 4], 10 + i, temperature=0.7 * (i % 2), request_id=f"r{i}", ignore_eos=True)
    for i in range(6)
]


def slow_device() -> Callable[[], None]:
    """Half a millisecond for each task: the host is always ahead."""
    return lambda: time.sleep(0.0005)


def answers(engine: Engine) -> list[Expected]:
    return [Expected.of(result) for result in engine.generate(REQUESTS)]


def agrees(**how: Any) -> bool:
    """Does an engine made so answer what the oracle says, and end well?"""
    engine = toy_engine(**how).start()
    try:
        return answers(engine) == [expected(r) for r in REQUESTS]
    except (AssertionError, EngineError):
        return False
    finally:
        engine.shutdown(drain=False)


def test_the_intact_engine_agrees_with_the_oracle() -> None:
    assert agrees(jitter=slow_device())


# ---------------------------------------------------------------- I1


class TwoComputeStreams(ToyRuntime):
    """Broken: each slot computes on a stream of its own, and the first one is slow."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        other = CpuDevice(jitter=lambda: time.sleep(0.001))
        slot = self.slots[0]
        self.slots = (
            DecodeSlot(0, other.new_stream("compute of its own"), slot.render, slot.staging),
            self.slots[1],
        )


def test_i1_two_compute_streams_give_wrong_tokens_and_are_refused() -> None:
    assert not agrees(runtime=TwoComputeStreams(), debug=False)
    with pytest.raises(AssertionError, match="I1"):
        check_shared_stream(TwoComputeStreams().slots)


# ---------------------------------------------------------------- I2


def test_i2_committing_the_newest_step_first_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(self: PipelineState[ScheduledSequence]) -> PendingCommit[ScheduledSequence] | None:
        if not self.batch_queue:
            return None
        self.committing_step = self.batch_queue.popleft()  # broken: the queue's other end
        return self.committing_step

    monkeypatch.setattr(PipelineState, "pop_oldest", newest)
    assert not agrees(jitter=slow_device(), debug=False)


# ---------------------------------------------------------------- I3


@contextmanager
def blocked_behind_a_step() -> Iterator[SimpleNamespace]:
    """A compute stream that has sampled step t, with the forward of t+1 stuck behind it."""
    device, gate = CpuDevice(), threading.Event()
    compute, copy = device.new_stream("compute"), device.new_stream("copy")
    host = {"token_ids": np.zeros(1, np.int32), "accepted": np.zeros(1, np.int32)}
    staging = {"token_ids": np.zeros(1, np.int32), "accepted": np.ones(1, np.int32)}
    compute.enqueue(lambda: staging["token_ids"].fill(42))
    sampled = compute.record()
    compute.enqueue(gate.wait)
    try:
        yield SimpleNamespace(compute=compute, sampled=sampled, render=RenderBuffer(host, copy), staging=staging)
    finally:
        gate.set()
        device.synchronize()
        device.close()


def start(parts: SimpleNamespace, anchor: DeviceEvent) -> Any:
    return parts.render.start_transfer(anchor, parts.staging, {"token_ids": 1, "accepted": 1})


def test_i3_a_copy_waits_for_its_own_step_and_not_for_the_stream() -> None:
    with blocked_behind_a_step() as parts:
        assert start(parts, parts.sampled).wait().token_ids.tolist() == [42]


def test_i3_a_copy_that_waits_for_the_stream_waits_for_the_next_step() -> None:
    with blocked_behind_a_step() as parts:
        transfer = start(parts, parts.compute.record())  # broken: everything enqueued so far, t+1 included
        assert not transfer._done.query()


# ---------------------------------------------------------------- I4


def test_i4_a_third_step_for_a_sequence_is_refused() -> None:
    rules: Any = SimpleNamespace(max_output_tokens=9)
    seq = ScheduledSequence(request(), SequenceInputs([1, 2]), rules)
    seq.schedule_prefill(2)
    seq.schedule_decode()
    assert not seq.can_decode
    with pytest.raises(NotIdle):
        seq.schedule_decode()


def test_i4_an_operation_that_no_step_holds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Scheduler.launch_forward_async

    def twice(self: Scheduler, plan: Any, slot_id: int) -> LaunchHandle[ScheduledSequence] | None:
        handle = launch(self, plan, slot_id)
        if plan.kind == "decode" and plan.sequences[0].can_decode:
            plan.sequences[0].schedule_decode()  # broken: counted, and in no step
        return handle

    monkeypatch.setattr(Scheduler, "launch_forward_async", twice)
    engine = toy_engine(prefill_policy="drain").start()  # so that the first decode step has no other before it
    with pytest.raises(EngineError, match="I4"):
        engine.generate(REQUESTS)
    engine.shutdown(drain=False)
    assert isinstance(engine.failure, AssertionError)
    (note,) = engine.failure.__notes__  # what the log prints below the traceback
    assert "schedule_prefill@" in note
    assert "schedule_decode@" in note


# ---------------------------------------------------------------- I5


def prefills_launched_behind_others(engine: Engine) -> int:
    """How many prefills were launched while a step was in flight, with requests that arrive one by one."""
    behind = 0
    choose = engine.scheduler.schedule_step

    def watch(pipeline: PipelineState[ScheduledSequence]) -> Any:
        nonlocal behind
        plan = choose(pipeline)
        behind += plan is not None and plan.n_chunks > 0 and not pipeline.is_empty
        return plan

    engine.scheduler.schedule_step = watch  # type: ignore[method-assign]
    first = engine.submit(request([1, 2], 60, ignore_eos=True))
    next(iter(first))
    for r in REQUESTS:
        engine.submit(r).result(timeout=30)
    first.result(timeout=30)
    return behind


def test_i5_drain_prefills_on_an_empty_pipeline_only() -> None:
    with toy_engine(prefill_policy="drain", jitter=slow_device()) as engine:
        assert prefills_launched_behind_others(engine) == 0
    # Broken on purpose: the other policies launch prefills behind decodes, and the check sees it.
    for policy in ("pipelined", "mixed"):
        with toy_engine(prefill_policy=policy, jitter=slow_device()) as engine:
            assert prefills_launched_behind_others(engine) > 0


def test_i5_a_launched_batch_cannot_take_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Scheduler.finalize_sampling

    def join(self: Scheduler, handle: Any, mask: Any) -> PendingCommit[ScheduledSequence]:
        step = sample(self, handle, mask)
        members = [*step.sequences, *self.state.running[:1]]  # broken: a sequence joins after the launch
        return PendingCommit(step.kind, members, step.payload, step.transfer)

    monkeypatch.setattr(Scheduler, "finalize_sampling", join)
    engine = toy_engine().start()
    with pytest.raises(EngineError, match="I5"):
        engine.generate(REQUESTS)
    engine.shutdown(drain=False)


# ---------------------------------------------------------------- I6


def test_i6_reusing_a_slot_before_its_commit_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PipelineState, "free_slot_id", lambda self: None if self.is_full else 0
    )  # broken: always 0
    monkeypatch.setattr(PipelineState, "slots_in_use", lambda self: 0)
    assert not agrees(jitter=slow_device(), debug=False)


def test_i6_the_state_machine_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineState, "free_slot_id", lambda self: None if self.is_full else 0)
    engine = toy_engine(jitter=slow_device()).start()
    with pytest.raises(EngineError, match="I6"):
        engine.generate(REQUESTS)
    engine.shutdown(drain=False)


# ---------------------------------------------------------------- I7


def test_i7_every_page_is_back_after_everything_has_ended() -> None:
    with toy_engine() as engine:
        answers(engine)
        engine.check_invariants()
        stats = engine.stats()
        assert (stats["rows_held"], stats["pages_private"]) == (0, 0)
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]  # type: ignore[operator]


def test_i7_a_row_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: SchedulerState, seq: ScheduledSequence) -> None:
        seq.release()  # broken: the sequence forgets its row, the table does not

    monkeypatch.setattr(SchedulerState, "give_back", keep)
    engine = toy_engine().start()
    engine.submit(REQUESTS[0])
    while engine.healthy:
        time.sleep(0)
    assert "rows held" in str(engine.failure)
    engine.shutdown(drain=False)


def test_i7_a_page_with_two_owners_is_noticed() -> None:
    with toy_engine(debug=False) as engine:
        answers(engine)
        table = engine.scheduler.manager.table
        table._owner[table.free_pages[0]] = 1  # broken: a free page claims to be a row's
        with pytest.raises(ConservationError):
            engine.check_invariants()
        table._owner[table.free_pages[0]] = -2


# ---------------------------------------------------------------- I8


def count_ends(engine: Engine) -> list[int]:
    ends = [0] * len(REQUESTS)

    def on_done(i: int) -> Callable[[Handle], None]:
        def count(handle: Handle) -> None:
            ends[i] += 1

        return count

    handles = [engine.submit(r, on_done=on_done(i)) for i, r in enumerate(REQUESTS)]
    handles[1].cancel()
    handles[2].hand_back()
    handles[3].cancel(FinishReason.DEADLINE)
    handles[3].cancel()
    engine.shutdown()
    assert all(handle.done() for handle in handles)
    return ends


def test_i8_every_request_ends_exactly_once_whatever_happens_to_it() -> None:
    assert count_ends(toy_engine(jitter=slow_device()).start()) == [1] * len(REQUESTS)


def test_i8_a_second_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine().start()
    handle = engine.submit(REQUESTS[0])
    result = handle.result(timeout=30)
    with pytest.raises(AssertionError, match="I8"):
        handle._end(result)  # broken: somebody else ends it as well
    engine.shutdown()


def test_i8_a_sequence_does_not_end_twice() -> None:
    with toy_engine() as engine:
        done = engine.submit(REQUESTS[0])
        seqs: list[ScheduledSequence] = []
        engine._call(lambda: seqs.extend(engine.scheduler.state.active))
        done.result(timeout=30)
        for seq in seqs:
            with pytest.raises(AssertionError, match="I8"):
                engine.scheduler.state.finalize(seq, Finish(FinishReason.STOP))


def test_i8_a_lost_end_is_made_up_for_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    finalize = SchedulerState.finalize

    def lose(self: SchedulerState, seq: ScheduledSequence, end: Any) -> None:
        finalize(self, seq, end)
        self.emissions = [one for one in self.emissions if not isinstance(one, SequenceEnded)]  # broken: unheard

    monkeypatch.setattr(SchedulerState, "finalize", lose)
    engine = toy_engine().start()
    handle = engine.submit(REQUESTS[0])
    engine.shutdown()
    with pytest.raises(EngineClosed):
        handle.result(timeout=0)
