"""An attempt: what a delivery does, from the state that earlier deliveries left in Redis, and then its way in the
engine.

Every delivery begins with `begin.lua`, which increments the task's fencing number, the attempt. `publish.lua`
refuses older attempts, so a worker that was disconnected but not dead can no longer write into the stream.

    no state                generate
    damaged keys            fail the task: nothing can be written to its stream
    tokens in the log       resume after them
    finished                return the recorded result
    cancel flag             end the task with the output so far
    a log that is damaged   fail the task: it cannot be resumed
    too many deaths         fail the task, with the output so far
    another model's tokens  fail the task: another model cannot resume them (the engine checks the adapter)
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from petiole.contract.results.outputs import Prepared
from petiole.gpu_worker.exceptions import EngineError, HandedBack
from petiole.gpu_worker.request import Delta, Request, Result
from petiole.gpu_worker.request.handle import Handle
from petiole.tasks.errors import GenerationFailed, ModelChanged, WorkersLost, describe
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.codec import BegunAttempt, LoggedOutput
from petiole.tasks.worker.broker.quarantine import Sign, end_stream
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.attempt_spans import AttemptSpans
from petiole.tasks.worker.delivery.delivery import Messages
from petiole.tasks.worker.generation.effects import Event
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.generation.job import Job
from petiole.tasks.worker.generation.presentation import Presentation
from petiole.tasks.worker.output.outcomes import Outcome, failed, recorded, succeeded, unreadable
from petiole.tasks.worker.output.publisher import Outbox, Publisher
from petiole.tasks.worker.reports.facts import Adapters


@dataclass(frozen=True, slots=True)
class BeginReply:
    """The reply of `begin.lua` for one task. `attempt` is 0 if the task is finished. `adapter` identifies the
    adapter by its content; the engine compares it, because the engine reads the files. `before`: the attempt
    before this one, if it is known; `died`: its worker has died."""

    attempt: int
    deaths: int
    cancel: bool
    model: str
    adapter: str
    record: dict[str, Any] | None
    written: LoggedOutput
    before: BegunAttempt | None = None
    died: bool = False

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> BeginReply | None:
        """Parse a reply. None: the task's keys are damaged."""
        if not reply:
            return None
        attempt, deaths, cancel, model, adapter, done, entries, before, died = reply
        return cls(
            attempt=int(attempt),
            deaths=int(deaths),
            cancel=bool(cancel),
            model=model.decode(errors="replace"),
            adapter=adapter.decode(errors="replace"),
            record=None if attempt else _record(done),
            written=LoggedOutput.of(entries),
            before=BegunAttempt.parse(int(attempt) - 1, before),
            died=bool(died),
        )

    def outcome(self, *, model: str, max_attempts: int) -> Outcome | None:
        """The outcome of a task that is not generated; None if it is generated. `cancel` ends the task in either
        case."""
        written = self.written
        if self.record is not None:
            return recorded(self.record, written)
        if written.unreadable:
            return unreadable(written)
        if self.deaths >= max_attempts:
            return failed(WorkersLost(self.deaths, written.text))
        if written.deltas and self.model and self.model != model:
            so_far = f"{len(written.token_ids)} tokens or texts are the work of model {self.model}"
            return failed(ModelChanged(f"{so_far}; this worker serves model {model}"))
        return None


def _record(done: bytes) -> dict[str, Any]:
    """How the task ended, in the form of `Outcome.record`."""
    try:
        record = json.loads(done)
        if isinstance(record["finish_reason"], str) and isinstance(record.get("error", {}), dict):
            return dict(record)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return failed(GenerationFailed("the record of its end in Redis cannot be read")).record


logger = logging.getLogger(__name__)


@dataclass
class RunningAttempt:
    """A task's attempt in the engine: its request, its output on the way to the stream, its spans.

    The engine's preparation and text threads call it. What they tell becomes an event of the job (`post`); the
    output does not pass through the job, but goes into the outbox.

    `handle` exists once the engine has the request. `spans`: None unless the attempt is traced. `post` passes
    an event to the job; `guarded` runs a step and posts the event that follows it; its exception gives the job up.
    `result_max_bytes()`: the largest result that can be stored, as far as it is known."""

    job: Job
    messages: Messages
    begun: BeginReply
    outbox: Outbox
    presentation: Presentation
    spans: AttemptSpans | None
    engine: EngineLike
    adapters: Adapters
    result_max_bytes: Callable[[], int]
    post: Callable[[Event], None]
    guarded: Callable[[Callable[[], Event | None]], None]
    handle: Handle | None = None
    _prompt_end: str = ""

    def submit(self, request: Request) -> None:
        if self.spans is not None:
            self.spans.submitted_ns = time.time_ns()
        try:
            self.handle = self.engine.submit(
                request,
                on_prepared=self._on_prepared,
                on_admitted=self._on_admitted,
                on_delta=self._on_delta,
                on_done=self._on_done,
            )
        except Exception as error:
            logger.exception("task %s could not be submitted", self.job.task_id)
            outcome = failed(error)
            self.post(lambda: self.job.generated(outcome, 0))

    def cancel(self) -> None:
        if self.handle is not None:
            self.handle.cancel()

    def hand_back(self) -> None:
        if self.handle is not None:
            self.handle.hand_back()

    def drop(self) -> None:
        """Nobody may hear of it any more."""
        self.outbox.drop()
        self.cancel()

    # ------------------------------------------------------------ engine's preparation and text threads

    def _on_prepared(self, handle: Handle, prepared: Prepared) -> None:
        self._prompt_end = prepared.prompt_end
        if self.spans is not None:
            self.spans.prepared_ns = time.time_ns()
        self.outbox.prepare(self.presentation.described(prepared, handle.request))

    def _on_admitted(self, handle: Handle) -> None:
        self.outbox.admit(handle.adapter_key or "")
        if self.spans is not None:
            self.spans.admitted_ns = time.time_ns()
        if handle.request.adapter is not None:
            self.adapters.used(handle.request.adapter)
        self.post(partial(self.job.admitted, time.monotonic(), self.messages.current.ending))

    def _on_delta(self, handle: Handle, delta: Delta) -> None:
        self.outbox.push(delta)
        if self.spans is not None:
            self.spans.heard()

    def _on_done(self, handle: Handle) -> None:
        if self.spans is not None:
            self.spans.generated(handle.result() if handle.error is None else None)
        self.guarded(lambda: self._end_of(handle))

    def _end_of(self, handle: Handle) -> Event:
        error, healthy = handle.error, self.engine.healthy
        if isinstance(error, HandedBack) or (isinstance(error, EngineError) and not healthy):
            return self.job.handed_back if healthy else self.job.engine_lost
        limit_bytes = self.result_max_bytes()
        if error is not None:
            return partial(self.job.generated, failed(error), limit_bytes)
        return lambda: self.job.generated(self._succeeded(handle.request, handle.result()), limit_bytes)

    def _succeeded(self, request: Request, result: Result) -> Outcome:
        """On the thread of events, because dividing a long text would delay the other streams."""
        lengths = partial(self.engine.text_lengths, request, result.token_ids)
        parts = self.presentation.parts(self.job.task_id, request, result, self._prompt_end, lengths)
        return succeeded(result, self.begun.attempt, self.begun.written, parts)


@dataclass(frozen=True, slots=True)
class OutboxListener:
    """What the publisher tells of an attempt's output, as events of its job. Output that cannot be written fails
    the task. `post` passes an event to the job."""

    job: Job
    publisher: Publisher
    completions: Completions
    post: Callable[[Event], None]

    def on_finished(self) -> None:
        self.post(self.job.written)

    def on_stale(self) -> None:
        logger.warning("task %s: a newer attempt owns it; dropped here", self.job.task_id)
        self.post(self.job.stale)

    def on_damaged(self) -> None:
        """The task's keys in Redis are damaged: it fails, and its stream has no last delta."""
        keys = stream_keys(self.job.task_id)
        expected = f"{keys.log} must be a list, and {keys.state} a hash with whole numbers as attempt and deaths"
        logger.error("task %s: its stream is damaged: %s", self.job.task_id, expected)
        self._fail(GenerationFailed(f"its stream in Redis is damaged: {expected}"))

    def on_fault(self, error: Exception) -> None:
        """The task's data cannot be handled: it fails, and a completion thread ends its stream."""
        failure = GenerationFailed(f"its data cannot be handled: {type(error).__name__}: {error}")
        self.completions.run(partial(self._end_with, failure))

    def _end_with(self, failure: GenerationFailed) -> None:
        task_id = self.job.task_id
        try:
            ttl_ms, error = self.publisher.ttl_ms, describe(failure)
            end_stream(connections.streams(), task_id, ttl_ms, error, sign=Sign(own=True))
        except Exception as error:
            logger.warning("task %s: its stream has no end: %s", task_id, error)
        self._fail(failure)

    def _fail(self, failure: GenerationFailed) -> None:
        self.post(partial(self.job.fail, failure))

    def on_released(self) -> None:
        self.post(self.job.released)

    def on_mismatch(self) -> None:
        differs = GenerationFailed("its log differs from what this attempt wrote")
        self.post(partial(self.job.give_up, differs))

    def on_cancel(self, *, flagged: bool) -> None:
        self.post(partial(self.job.cancel_asked, flagged=flagged))
