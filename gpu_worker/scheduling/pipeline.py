"""The in-flight steps: their order and their slots. A pure state machine, without CUDA and sequence state.

Problem: with one step at a time, the device idles while the host commits a step and plans the next.

    blocking    host    [plan][launch]........wait.........[commit][plan][launch]........
                device                [==== forward ====]                        [=======

Solution: two slots. While the device computes step t+1, the host commits step t and plans step t+2.

    pipelined   host    [launch t][launch t+1][commit t][launch t+2][commit t+1]...
                device            [== t ==][== t+1 ==][== t+2 ==]

A step moves through three states. Each transition asserts its preconditions.

    on_launch            on_pending_commit           pop_oldest             on_step_completed
    ---------> launch_handle -----------> batch_queue ---------> committing_step ---------> gone
               (forward launched,         (sampled, copy         (results being
                not yet sampled)           in progress)           applied)

Invariants:
- At most `num_slots` steps are in flight, each in its own slot. One slot gives the blocking engine.
- Steps complete in launch order (I2): at most one step is launched but unsampled, and the queue is FIFO.
- A slot is in use until `on_step_completed`. The end of the copy does not free it, because `commit_step` still
  reads the slot's host buffers (I6). Therefore completion has two phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from petiole.gpu_worker.runtime.interface import StepKind, Transfer

S = TypeVar("S")


class Payload(Protocol):
    """Data attached to a step by its launcher. The pipeline uses only the slot."""

    @property
    def slot_id(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class LaunchHandle(Generic[S]):
    """A launched forward that is not sampled yet. `sequences[i]` is entry i of the step's buffers."""

    kind: StepKind
    sequences: Sequence[S]
    payload: Payload

    @property
    def slot_id(self) -> int:
        return self.payload.slot_id


@dataclass(frozen=True, slots=True, eq=False)
class PendingCommit(Generic[S]):
    """A sampled step whose results are being copied to the host."""

    kind: StepKind
    sequences: Sequence[S]
    payload: Payload
    transfer: Transfer

    @property
    def slot_id(self) -> int:
        return self.payload.slot_id


class PipelineState(Generic[S]):
    """The queue of in-flight steps. Called only by the engine's loop; never modifies a sequence."""

    def __init__(self, num_slots: int = 2) -> None:
        assert num_slots >= 1, f"a pipeline needs a slot, got {num_slots}"
        self.num_slots = num_slots
        self.launch_handle: LaunchHandle[S] | None = None
        self.batch_queue: deque[PendingCommit[S]] = deque()  # newest left, oldest right
        self.committing_step: PendingCommit[S] | None = None

    # ------------------------------------------------------------ derived

    def steps(self) -> Iterator[LaunchHandle[S] | PendingCommit[S]]:
        """All steps in flight, oldest first."""
        if self.committing_step is not None:
            yield self.committing_step
        yield from reversed(self.batch_queue)
        if self.launch_handle is not None:
            yield self.launch_handle

    @property
    def in_flight(self) -> int:
        """Number of steps that hold a slot."""
        return len(self.batch_queue) + (self.launch_handle is not None) + (self.committing_step is not None)

    @property
    def is_empty(self) -> bool:
        return self.in_flight == 0

    @property
    def is_full(self) -> bool:
        return self.in_flight == self.num_slots

    def slots_in_use(self) -> int:
        """Bit mask of the slots in use."""
        mask = 0
        for step in self.steps():
            mask |= 1 << step.slot_id
        return mask

    def free_slot_id(self) -> int | None:
        """The lowest free slot, or None."""
        used = self.slots_in_use()
        return next((slot for slot in range(self.num_slots) if not used >> slot & 1), None)

    # ------------------------------------------------------------ transitions

    def on_launch(self, handle: LaunchHandle[S]) -> None:
        assert self.launch_handle is None, (
            "a launched step is still unsampled: sampling would run out of order (I2)"
        )
        assert 0 <= handle.slot_id < self.num_slots, f"slot {handle.slot_id} of {self.num_slots}"
        assert not self.slots_in_use() >> handle.slot_id & 1, f"slot {handle.slot_id} is in use (I6)"
        self.launch_handle = handle

    def on_pending_commit(self, step: PendingCommit[S]) -> None:
        handle = self.launch_handle
        assert handle is not None, "nothing was launched"
        assert step.slot_id == handle.slot_id, f"launched in slot {handle.slot_id}, sampled in {step.slot_id}"
        assert step.sequences is handle.sequences, "membership of a launched step is frozen (I5)"
        self.launch_handle = None
        self.batch_queue.appendleft(step)

    def pop_oldest(self) -> PendingCommit[S] | None:
        """Start committing the oldest sampled step, or return None. Its slot stays in use."""
        assert self.committing_step is None, "the previous step was not completed (I2)"
        if not self.batch_queue:
            return None
        self.committing_step = self.batch_queue.pop()
        return self.committing_step

    def on_step_completed(self) -> None:
        """Free the slot of the committing step. Called after `commit_step` has consumed the results."""
        assert self.committing_step is not None, "no step is being committed"
        self.committing_step = None

    def abandon(self) -> None:
        """Drop all steps after a device error. The caller releases their sequences."""
        self.launch_handle = None
        self.committing_step = None
        self.batch_queue.clear()
