"""The loop of the engine thread: one loop for prefill and decode, pipelined or blocking, constrained or not.

    round:  run the posted commands; end the requests whose deadline has passed; deliver
            plan a step and launch its forward
            commit the earlier steps that its masks depend on; compute the masks; launch its sampling
            commit the oldest step if all slots are in use or nothing was launched
    idle:   sleep until the inbox has a command or a deadline passes

The blocking engine is the same loop with one slot. Other threads post commands (functions) to the inbox, so the
scheduler needs no locks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from petiole.gpu_worker.exceptions import EngineError
from petiole.gpu_worker.request import FinishReason
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.state import Emission, SequenceEnded
from petiole.gpu_worker.scheduling.stopping import Finish
from petiole.gpu_worker.threads.history import history_of
from petiole.gpu_worker.tracing import NO_TRACE, Tracer

logger = logging.getLogger(__name__)

Command = Callable[[], None]

_HISTORIES = "the last transitions of the sequences, as transition@committed position+positions scheduled beyond:"


class EngineLoop:
    """The engine's main loop. All methods run on the engine thread; other threads call only `post`.

    `deliver(emissions)` receives committed tokens and ends, in order. `on_fatal(error)` is called on the engine
    thread after a device failure, before any cleanup; it must end every request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: PipelineState[ScheduledSequence],
        deliver: Callable[[list[Emission]], None],
        on_fatal: Callable[[BaseException], None],
        tracer: Tracer = NO_TRACE,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.paused = False
        self.asleep = False
        self.last_round_s = time.monotonic()
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._tracer = tracer
        self._debug = debug
        self._stopping = False
        self._inbox: list[Command] = []
        self._wake = threading.Condition()

    # ------------------------------------------------------------ from other threads

    def post(self, command: Command) -> None:
        """Run `command` on the engine thread between two rounds."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def beat(self) -> None:
        """Note that the engine makes progress. Long commands and steps call it, on any thread."""
        self.last_round_s = time.monotonic()

    def unpause(self) -> None:
        """Launch steps again. To be posted as a command."""
        self.paused = False

    def stop_when_done(self) -> None:
        """Return from `run` once no work is left. To be posted as a command."""
        self._stopping = True
        self.unpause()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        try:
            while self._take_commands():
                busy = self._round()
                if not busy:
                    self._sleep()
        except BaseException as error:
            self._fail(error)

    def _take_commands(self) -> bool:
        """Run the posted commands, end expired requests and deliver. Returns False when the loop should exit."""
        self.beat()
        if self._inbox:
            with self._wake:
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
        state = self.scheduler.state
        for seq in state.expired(time.perf_counter()):
            state.finalize(seq, Finish(FinishReason.DEADLINE))
        self.flush()
        return not self._stopping or state.has_work

    def _round(self) -> bool:
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

    def flush(self) -> None:
        """Deliver the emissions collected so far."""
        state = self.scheduler.state
        if state.emissions:
            emissions, state.emissions = state.emissions, []
            if self._tracer.enabled:
                self._trace_ends(emissions)
            self._deliver(emissions)

    def _trace_ends(self, emissions: list[Emission]) -> None:
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

    def _sleep(self) -> None:
        self.flush()  # planning may have ended a request without launching a step
        deadline = self.scheduler.state.next_deadline()
        with self._wake:
            if self._inbox or (self._stopping and not self.scheduler.state.has_work):
                return
            self.asleep = True
            self._wake.wait(None if deadline is None else max(0.0, deadline - time.perf_counter()))
            self.asleep = False

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
