"""The loop of the engine thread: one loop for prefill and decode, pipelined or blocking, constrained or not.

    turn:   plan a step and launch its forward
            commit the earlier steps that its masks depend on; compute the masks; launch its sampling
            commit the oldest step if all slots are in use or nothing was launched

The blocking engine is the same loop with one slot. Before each turn, the inbox: see `CommandLoop`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from petiole.gpu_worker.exceptions import EngineError
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.state import Emission, SequenceEnded
from petiole.gpu_worker.threads.history import history_of
from petiole.gpu_worker.threads.inbox import CommandLoop

logger = logging.getLogger(__name__)

_HISTORIES = "the last transitions of the sequences, as transition@committed position+positions scheduled beyond:"


class EngineLoop(CommandLoop):
    """The engine's main loop. `on_fatal(error)` is called after a device failure, before any cleanup."""

    def __init__(
        self,
        scheduler: Scheduler,
        deliver: Callable[[list[Emission]], None],
        on_fatal: Callable[[BaseException], None],
        tracer: Tracer = NO_TRACE,
        *,
        slots: int = 2,
        debug: bool = False,
    ) -> None:
        super().__init__(scheduler.state, deliver, on_fatal)
        self.scheduler = scheduler
        self.pipeline = PipelineState[ScheduledSequence](slots)
        self.paused = False
        self._tracer = tracer
        self._debug = debug

    def unpause(self) -> None:
        """Launch steps again. To be posted as a command."""
        self.paused = False

    # ------------------------------------------------------------ the loop

    def _turn(self) -> bool:
        """One iteration. Returns False if it launched and committed nothing."""
        launched = not self.paused and self._launch()
        committed = False
        if self.pipeline.is_full or not launched:
            committed = self._commit_oldest()
        if not (launched or committed or self.paused) and self.scheduler.state.has_work:
            launched = self._break_stall()
        if self._debug:
            self.check_invariants()
        return launched or committed

    def _launch(self) -> bool:
        """Plan, launch and sample the next step. Returns False if there is no free slot or no step to run."""
        scheduler, pipeline, span = self.scheduler, self.pipeline, self._tracer.span
        slot_id = pipeline.free_slot_id()
        if slot_id is None:
            return False
        step_id = scheduler.state.counters.steps
        with span("plan", slot_id, step_id):
            plan = scheduler.schedule_step(pipeline)
        if plan is None:
            return False
        with span("launch", slot_id, step_id):
            handle = scheduler.launch_forward_async(plan, slot_id)
        if handle is None:
            return True  # failed on the host; its sequences have been finalized
        pipeline.on_launch(handle)
        while any(scheduler.sampling_must_wait(handle, step) for step in pipeline.batch_queue):
            self._commit_oldest()
        with span("mask", slot_id, step_id):
            mask = scheduler.compute_mask(handle)
        with span("sample", slot_id, step_id):
            pipeline.on_pending_commit(scheduler.finalize_sampling(handle, mask))
        return True

    def _commit_oldest(self) -> bool:
        step = self.pipeline.pop_oldest()
        if step is None:
            return False
        self.scheduler.commit_step(step)
        self.pipeline.on_step_completed()
        self.flush()
        return True

    def _trace_ends(self, emissions: list[Emission]) -> None:
        if not self._tracer.enabled:
            return
        for emission in emissions:
            if isinstance(emission, SequenceEnded):
                history = {"history": history_of(emission.seq)}
                self._tracer.mark(f"{emission.seq.request.request_id} ended", history)

    def drain(self) -> None:
        """Commit all in-flight steps, oldest first. Requires that no launched step is unsampled (true between
        rounds)."""
        assert self.pipeline.launch_handle is None
        while self._commit_oldest():
            pass

    def _break_stall(self) -> bool:
        """Fail the first waiting request when nothing is in flight and nothing can start. Every accepted request
        fits alone, so this should not happen; failing it keeps it from blocking the queue forever."""
        state = self.scheduler.state
        if state.cutting.busy or (state.tier is not None and state.tier.busy):
            return False  # its outcome wakes the loop
        first = state.waiting.first()
        assert first is not None, f"stalled with {state.active} and {state.num_zombies} zombies"
        usage = state.manager.usage()
        state.finalize(first, EngineError(f"request {first.request.request_id} cannot be scheduled: {usage}"))
        return True

    # ------------------------------------------------------------ faults

    def check_invariants(self) -> None:
        """See `Scheduler.check_invariants`. A failure has a note with the histories of the sequences."""
        try:
            self.scheduler.check_invariants(self.pipeline)
        except AssertionError as error:
            self._add_histories(error)
            raise

    def _add_histories(self, error: BaseException) -> None:
        """Add a note with the last transitions of each sequence, if they are recorded."""
        steps = self.pipeline.steps()
        sequences = {*self.scheduler.state.active, *(seq for step in steps for seq in step.sequences)}
        lines = [f"{seq}: {history}" for seq in sequences if (history := history_of(seq))]
        if lines and not any(note.startswith(_HISTORIES) for note in getattr(error, "__notes__", ())):
            error.add_note("\n".join([_HISTORIES, *sorted(lines)]))

    def _fail(self, error: BaseException) -> None:
        """Handle a fatal error: end every request first, then synchronize the device and release all state."""
        self._add_histories(error)
        logger.critical("the engine has failed", exc_info=error)
        self._on_fatal(error)
        scheduler, state = self.scheduler, self.scheduler.state
        try:
            scheduler.runtime.synchronize()
        except Exception as again:
            logger.error("synchronising the failed device: %r", again)
        scheduler.abandon(self.pipeline)
        state.emissions.clear()
