"""The pipeline's queue and slots. Mock sequences, mock transfers, no device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from petiole.gpu_worker.runtime.interface import StepKind, StepOutput
from petiole.gpu_worker.scheduling.pipeline import LaunchHandle, PendingCommit, PipelineState


class NoTransfer:
    def wait(self) -> StepOutput:
        raise AssertionError("the pipeline never waits")


def launched(slot: int, sequences: Sequence[str] = (), kind: StepKind = "decode") -> LaunchHandle[str]:
    return LaunchHandle(kind, sequences, SimpleNamespace(slot_id=slot))


def sampled(handle: LaunchHandle[str]) -> PendingCommit[str]:
    return PendingCommit(handle.kind, handle.sequences, handle.payload, NoTransfer())


def push(pipeline: PipelineState[str], *sequences: str) -> PendingCommit[str]:
    slot = pipeline.free_slot_id()
    assert slot is not None
    handle = launched(slot, sequences)
    pipeline.on_launch(handle)
    step = sampled(handle)
    pipeline.on_pending_commit(step)
    return step


def complete(pipeline: PipelineState[str]) -> PendingCommit[str]:
    step = pipeline.pop_oldest()
    assert step is not None
    pipeline.on_step_completed()
    return step


def test_an_empty_pipeline_has_both_slots_free() -> None:
    pipeline = PipelineState[str](2)
    assert (pipeline.is_empty, pipeline.is_full, pipeline.free_slot_id()) == (True, False, 0)
    assert pipeline.pop_oldest() is None
    assert list(pipeline.steps()) == []


def test_slots_alternate() -> None:
    pipeline = PipelineState[str](2)
    slots = [push(pipeline).slot_id, push(pipeline).slot_id]
    for _ in range(5):
        complete(pipeline)
        slots.append(push(pipeline).slot_id)
    assert slots == [0, 1, 0, 1, 0, 1, 0]


def test_completion_is_oldest_first() -> None:
    pipeline = PipelineState[str](2)
    first, second = push(pipeline, "a"), push(pipeline, "b")
    assert list(pipeline.steps()) == [first, second]
    assert [complete(pipeline), complete(pipeline)] == [first, second]


def test_a_full_pipeline_has_no_slot() -> None:
    pipeline = PipelineState[str](2)
    push(pipeline)
    push(pipeline)
    assert pipeline.is_full
    assert pipeline.free_slot_id() is None


def test_a_slot_is_in_use_until_its_commit_is_completed() -> None:
    pipeline = PipelineState[str](2)
    push(pipeline)
    push(pipeline)
    step = pipeline.pop_oldest()
    assert step is not None
    assert pipeline.free_slot_id() is None, "I6: the commit still reads the slot's buffers"
    pipeline.on_step_completed()
    assert pipeline.free_slot_id() == step.slot_id


def test_a_launched_forward_holds_its_slot_before_it_is_sampled() -> None:
    pipeline = PipelineState[str](2)
    pipeline.on_launch(launched(0))
    assert (pipeline.free_slot_id(), pipeline.in_flight) == (1, 1)


def test_forward_may_run_ahead_of_a_commit() -> None:
    """Constrained: t+1 is launched, t is committed, then t+1 is sampled."""
    pipeline = PipelineState[str](2)
    first = push(pipeline, "a")
    handle = launched(1, ["a"])
    pipeline.on_launch(handle)
    assert complete(pipeline) is first
    step = sampled(handle)
    pipeline.on_pending_commit(step)
    assert complete(pipeline) is step
    assert pipeline.is_empty


def test_depth_one_is_the_blocking_engine() -> None:
    pipeline = PipelineState[str](1)
    push(pipeline)
    assert pipeline.is_full
    assert pipeline.free_slot_id() is None
    complete(pipeline)
    assert pipeline.free_slot_id() == 0


def test_steps_are_listed_oldest_first_wherever_they_are() -> None:
    pipeline = PipelineState[str](3)
    first, second = push(pipeline), push(pipeline)
    handle = launched(2)
    pipeline.on_launch(handle)
    pipeline.pop_oldest()
    assert list(pipeline.steps()) == [first, second, handle]


def test_kinds_travel_with_their_steps() -> None:
    pipeline = PipelineState[str](2)
    pipeline.on_launch(launched(0, kind="prefill"))
    assert pipeline.launch_handle is not None
    pipeline.on_pending_commit(sampled(pipeline.launch_handle))
    assert complete(pipeline).kind == "prefill"


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    with pytest.raises(AssertionError, match="slot"):
        PipelineState[str](2).on_launch(launched(slot))


def test_launching_into_a_busy_slot_is_refused() -> None:
    pipeline = PipelineState[str](2)
    push(pipeline)
    with pytest.raises(AssertionError, match="I6"):
        pipeline.on_launch(launched(0))


def test_launching_twice_without_sampling_is_refused() -> None:
    pipeline = PipelineState[str](2)
    pipeline.on_launch(launched(0))
    with pytest.raises(AssertionError, match="I2"):
        pipeline.on_launch(launched(1))


def test_sampling_what_was_not_launched_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing was launched"):
        PipelineState[str](2).on_pending_commit(sampled(launched(0)))


def test_sampling_in_another_slot_is_refused() -> None:
    pipeline = PipelineState[str](2)
    pipeline.on_launch(launched(0))
    with pytest.raises(AssertionError, match="slot"):
        pipeline.on_pending_commit(sampled(launched(1)))


def test_membership_may_not_change_between_launch_and_sampling() -> None:
    pipeline = PipelineState[str](2)
    pipeline.on_launch(launched(0, ["a"]))
    with pytest.raises(AssertionError, match="I5"):
        pipeline.on_pending_commit(sampled(launched(0, ["a", "b"])))


def test_two_steps_are_never_committed_at_once() -> None:
    pipeline = PipelineState[str](2)
    push(pipeline)
    push(pipeline)
    pipeline.pop_oldest()
    with pytest.raises(AssertionError, match="I2"):
        pipeline.pop_oldest()


def test_completing_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="no step"):
        PipelineState[str](2).on_step_completed()


def test_abandoning_forgets_every_step() -> None:
    pipeline = PipelineState[str](2)
    push(pipeline)
    pipeline.on_launch(launched(1))
    pipeline.abandon()
    assert pipeline.is_empty
    assert pipeline.free_slot_id() == 0


class PipelineMachine(RuleBasedStateMachine):
    """Random transitions; a list of slots, oldest first, is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = PipelineState[str](2)
        self.slots: list[int] = []
        self.unsampled = False
        self.committing = False

    @rule()
    def launch(self) -> None:
        slot = self.pipeline.free_slot_id()
        assert (slot is None) == (len(self.slots) == 2)
        if slot is None or self.unsampled:
            return
        self.pipeline.on_launch(launched(slot))
        self.slots.append(slot)
        self.unsampled = True

    @rule()
    def sample(self) -> None:
        if self.pipeline.launch_handle is not None:
            self.pipeline.on_pending_commit(sampled(self.pipeline.launch_handle))
            self.unsampled = False

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.committing:
            self.pipeline.on_step_completed()
            self.slots.pop(0)
            self.committing = False
            return
        step = self.pipeline.pop_oldest()
        if step is None:
            assert len(self.slots) == int(self.unsampled)
        else:
            assert step.slot_id == self.slots[0]
            self.committing = True

    @invariant()
    def agrees(self) -> None:
        assert [step.slot_id for step in self.pipeline.steps()] == self.slots
        assert self.pipeline.in_flight == len(self.slots) <= 2
        assert len(set(self.slots)) == len(self.slots)


TestPipelineMachine = PipelineMachine.TestCase
TestPipelineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
