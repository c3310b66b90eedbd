"""Drives one job: passes events to it, and carries out its effects.

Any thread may call `post`. The events of all jobs happen on one thread, in the order in which they were posted. An
effect never waits: work that waits for Redis runs on a completion thread, and changes of Celery's request are
posted to the consumer's thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from petiole.gpu_worker.request import Request
from petiole.gpu_worker.threads.thread_pool import ThreadPool
from petiole.tasks.errors import GenerationFailed, describe
from petiole.tasks.fleet import control
from petiole.tasks.servers import connections
from petiole.tasks.settings import Settings
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.ledger import Account
from petiole.tasks.worker.broker.quarantine import Sign, end_stream
from petiole.tasks.worker.completion.backend import store_started
from petiole.tasks.worker.completion.completion import Completion
from petiole.tasks.worker.completion.reports import OtherDelivery, Report
from petiole.tasks.worker.completion.standby import Standby
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.attempt_spans import AttemptSpans
from petiole.tasks.worker.delivery.delivery import Delivery, Messages
from petiole.tasks.worker.delivery.mailbox import Mailbox
from petiole.tasks.worker.delivery.time_limits import TimeLimits
from petiole.tasks.worker.generation import effects
from petiole.tasks.worker.generation.attempts import BeginReply, RunningAttempt
from petiole.tasks.worker.generation.effects import Action, Effect, Effects
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.generation.job import OVER, WRITING, Job, State
from petiole.tasks.worker.generation.presentation import Presentation, Presentations
from petiole.tasks.worker.output.outcomes import Ending, Outcome
from petiole.tasks.worker.output.publisher import Outbox, Publisher
from petiole.tasks.worker.reports.facts import Adapters
from petiole.tasks.worker.reports.histograms import TaskHistograms

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """The services that the jobs of a worker share.

    `result_max_bytes()`: the largest result that can be stored, as far as it is known. `events`: the thread on
    which the events of all jobs happen. `jobs`, by task id, is changed by the consumer's thread.
    """

    settings: Settings
    engine: EngineLike
    publisher: Publisher
    completions: Completions
    mailbox: Mailbox
    tally: TaskHistograms
    result_max_bytes: Callable[[], int]
    events: ThreadPool = field(default_factory=lambda: ThreadPool(1, "petiole-jobs"))
    jobs: dict[str, JobDriver] = field(default_factory=dict)
    adapters: Adapters = field(default_factory=Adapters)

    @cached_property
    def presentations(self) -> Presentations:
        return Presentations(self.engine)


class JobDriver:
    """The driver of one job. Celery keeps it as the handle to terminate the task. Any thread may read `job`.

    `attempt` exists once it has begun and until the job is over, `completion` while the task is completed, `spans`
    if the attempt is traced.
    """

    def __init__(self, services: Services, delivery: Delivery) -> None:
        self.services = services
        self.messages = Messages(delivery)
        self.job = Job(delivery.task_id, time.monotonic())
        self.attempt: RunningAttempt | None = None
        self.completion: Completion | None = None
        self.presentation = Presentation()
        self.spans: AttemptSpans | None = None

    @property
    def task_id(self) -> str:
        return self.job.task_id

    @property
    def placed(self) -> bool:
        """Whether an attempt has begun here and is not over."""
        return self.attempt is not None and not self.job.over

    @property
    def busy(self) -> bool:
        """Whether the task may still finish here. False while the result backend refuses the outcome: the next
        worker can store it."""
        return (self.attempt is not None or self.job.outcome is not None) and not (
            self.job.over or self.job.parked
        )

    # ------------------------------------------------------------ any thread

    def post(self, event: Callable[[], Effects]) -> None:
        """Pass `event` to the job, and carry out the effects."""
        self.services.events.put(lambda: self._happen(event))

    def give_up(self, error: BaseException) -> None:
        self.post(partial(self.job.give_up, error))

    def _guarded(self, step: Callable[[], object]) -> None:
        """A step on another thread: an exception gives the job up, so that its message is not held for ever."""
        try:
            step()
        except Exception as error:
            self.give_up(error)

    # ------------------------------------------------------------ the thread of events

    def _happen(self, event: Callable[[], Effects]) -> None:
        before = self.job.state
        try:
            for effect in event():
                self._carry_out(effect)
        except Exception as error:
            if not (what_follows := self.job.give_up(error)):
                raise
            for effect in what_follows:
                self._carry_out(effect)
        if self.spans is not None and self.attempt is not None and self.job.over and before not in OVER:
            self._end_spans(self.spans, before)
        if self.job.over:
            self.attempt = None  # they refer to each other: only the garbage collector would free both
        if self.job.state is State.HANDED_BACK and before is not State.HANDED_BACK:
            self.services.mailbox.post(lambda: None)  # the shutdown waits for it

    def _end_spans(self, spans: AttemptSpans, before: State) -> None:
        """The job is over, from this state. Where that counts as a death, the next attempt tells of this one."""
        state = self.job.state
        given_up = before in WRITING and state in (State.STANDING_BY, State.GIVEN_UP)
        failing = before is State.GENERATING and state is State.HANDED_BACK
        if not ((given_up or failing) and spans.counts):
            spans.end(self.job.outcome, state.name.lower())

    def _carry_out(self, effect: Effect) -> None:
        services, job = self.services, self.job
        match effect:
            case effects.Submit(request):
                self._begun.submit(request)
            case Action.CANCEL:
                self._begun.cancel()
            case Action.HAND_BACK:
                self._begun.hand_back()
            case Action.RELEASE:
                self._begun.outbox.release()
            case effects.WriteEnd(outcome):
                self._write_end(outcome)
            case Action.FLAG:
                services.completions.run(partial(control.flag_cancel, job.task_id))
            case effects.Accept(at):
                self._on_consumer(partial(self._accept, at))
            case Action.STORE_STARTED:
                services.completions.run(self._store_started)
            case effects.Count(outcome):
                services.tally.count(outcome)
            case effects.Complete(replay):
                self._complete(replay)
            case Action.GO_ON:
                self._go_on()
            case effects.Park(refusal):
                if refusal is not None:
                    logger.error("task %s: its outcome cannot be stored yet: %s", job.task_id, refusal)
                services.completions.run_later(partial(self.post, job.again))
            case Action.STAND_BY:
                self._on_consumer(self._standby().watch)
            case effects.Settle():
                if job.parked_at is not None:
                    logger.warning("task %s: its outcome is stored", job.task_id)
                self._on_consumer(partial(self._settle, effect))
            case Action.LEAVE:
                self._on_consumer(self._leave)
            case Action.REQUEUE:
                self._on_consumer(self._requeue)
            case effects.GiveUp(error):
                self._drop(error)

    def _write_end(self, outcome: Outcome) -> None:
        try:
            self._begun.outbox.finish(outcome)
        except Exception as error:  # the outcome cannot be written as JSON
            self.on_fault(error)

    def _complete(self, replay: bool) -> None:
        assert self.job.outcome is not None
        self.completion = Completion(
            self.task_id,
            self.messages,
            self.job.outcome,
            replay=replay,
            hard_limit_s=self.job.limit_s("hard"),
            tell=self._told,
            hand_on=self._go_on,
        )
        self._go_on()

    def _go_on(self) -> None:
        """Take the next step of the completion, on a thread that may take it."""
        if (completion := self.completion) is None:  # the job was given up
            return
        if completion.for_consumer:
            self._on_consumer(completion.take)
        else:
            self.services.completions.take(completion)

    def _standby(self) -> Standby:
        services, lease_s = self.services, self.services.settings.visibility_timeout_s
        return Standby(self.task_id, self.messages, services.mailbox, services.completions, lease_s, self._told)

    def _drop(self, error: BaseException) -> None:
        logger.error("task %s is given up here; its message is requeued", self.task_id, exc_info=error)
        if (attempt := self.attempt) is not None:
            attempt.drop()
        # Not at once, because the same error may happen again. Without effect at shutdown, when all unacknowledged
        # messages go back.
        self._on_consumer(self._forget)
        self.services.completions.run_later(lambda: self._on_consumer(self.messages.current.requeue))

    def _on_consumer(self, step: Callable[[], object]) -> None:
        self.services.mailbox.post(lambda: self._guarded(step))

    @property
    def _begun(self) -> RunningAttempt:
        assert self.attempt is not None
        return self.attempt

    # ------------------------------------------------------------ intake

    def trace(self, model: str) -> None:
        """An attempt is about to begin."""
        self.spans = AttemptSpans.of(self.messages.current, self.job.taken_at, model)

    def begin(
        self,
        begun: BeginReply,
        start: Request | Outcome,
        limits: TimeLimits,
        *,
        needs_reader: bool = False,
        marked: bool = False,
        ttl_s: int | None = None,
        account: Account | None = None,
    ) -> None:
        """An attempt has begun: generate, or end with the outcome. `marked`: `begin.lua` has set `running`."""
        ending = "revoked" if begun.cancel else self.messages.current.ending
        services = self.services
        outbox = Outbox(
            services.publisher,
            self.task_id,
            begun.attempt,
            begun.written,
            self,
            needs_reader=needs_reader,
            marked=marked,
            ttl_s=ttl_s,
            account=account,
        )
        self.attempt = RunningAttempt(
            self.job,
            self.messages,
            begun,
            outbox,
            self.presentation,
            self.spans,
            services.engine,
            services.adapters,
            services.result_max_bytes,
            self.post,
            self._guarded,
        )
        self.post(partial(self.job.begun, start, limits, ending))

    def replay(self, outcome: Outcome, limits: TimeLimits) -> None:
        """An earlier delivery finished the task: store the recorded outcome, if it is not stored yet."""
        self.post(partial(self.job.recorded, outcome, limits))

    def fail(self, error: Exception) -> None:
        self.post(partial(self.job.fail, error))

    # ------------------------------------------------------------ publisher

    def on_finished(self) -> None:
        self.post(self.job.written)

    def on_stale(self) -> None:
        logger.warning("task %s: a newer attempt owns it; dropped here", self.task_id)
        self.post(self.job.stale)

    def on_damaged(self) -> None:
        """The task's keys in Redis are damaged: it fails, and its stream has no last delta."""
        keys = stream_keys(self.task_id)
        expected = f"{keys.log} must be a list, and {keys.state} a hash with whole numbers as attempt and deaths"
        logger.error("task %s: its stream is damaged: %s", self.task_id, expected)
        self.fail(GenerationFailed(f"its stream in Redis is damaged: {expected}"))

    def on_fault(self, error: Exception) -> None:
        """The task's data cannot be written, or its attempt cannot begin: the task fails, and its stream ends."""
        if (attempt := self.attempt) is not None:
            attempt.outbox.drop()
        failure = GenerationFailed(f"its data cannot be handled: {type(error).__name__}: {error}")
        self.services.completions.run(partial(self._end_with, failure))

    def _end_with(self, failure: GenerationFailed) -> None:
        """On a completion thread."""
        try:
            ttl_ms, error = self.services.publisher.ttl_ms, describe(failure)
            end_stream(connections.streams(), self.task_id, ttl_ms, error, sign=Sign(own=True))
        except Exception as error:
            logger.warning("task %s: its stream has no end: %s", self.task_id, error)
        self.fail(failure)

    def on_released(self) -> None:
        self.post(self.job.released)

    def on_mismatch(self) -> None:
        self.give_up(GenerationFailed("its log differs from what this attempt wrote"))

    def on_cancel(self, *, flagged: bool) -> None:
        self.post(partial(self.job.cancel_asked, flagged=flagged))

    # ------------------------------------------------------------ completion threads

    def _told(self, report: Report) -> None:
        if report is OtherDelivery.ANSWERED:  # on the consumer's thread
            self._forget()
        self.post(partial(self.job.reported, report, time.monotonic()))

    def _store_started(self) -> None:
        request = self.messages.current.request
        try:
            if self.job.outcome is None and not request.ignore_result:
                meta = {"pid": os.getpid(), "hostname": request.hostname}
                store_started(request.task.backend, self.task_id, meta, request._context)
        finally:
            self.post(self.job.started_stored)

    # ------------------------------------------------------------ consumer's thread

    def rebind(self, delivery: Delivery) -> None:
        """The message came again after a lost connection: keep generating, and answer the new request object."""
        if self.messages.add(delivery):
            if self.messages.accepted_at is not None:
                delivery.begun()
            if delivery.request.ending is not None:
                self.stop(delivery.request.ending)

    def stop(self, ending: Ending) -> None:
        """Cancel the generation, because the task was revoked or has expired."""
        self.post(partial(self.job.stop, ending))

    def terminate(self, signum: object = None) -> None:
        """Called by Celery when the worker shuts down."""
        self.hand_back()

    def hand_back(self) -> None:
        """Let another worker resume the task. The job is over once all output of this attempt is in the log."""
        self.post(self.job.hand_back)

    def _accept(self, at: float) -> None:
        delivery = self.messages.current
        delivery.begun()
        delivery.request.revoked()  # or expired, while it waited in the engine
        if delivery.request.ending is not None:
            self.stop(delivery.request.ending)
        else:
            self.messages.accept(at)
            self.post(self.job.accepted)

    def _settle(self, how: effects.Settle) -> None:
        self._forget()
        if how.soft_limit_s is not None:
            self.messages.current.timeout_callback(True, how.soft_limit_s)
        self.messages.current.callback((how.failed, how.value, how.runtime_s))

    def _leave(self) -> None:
        self._forget()
        self.messages.current.acknowledge()

    def _requeue(self) -> None:
        self._forget()
        self.messages.current.requeue()

    def _forget(self) -> None:
        if self.services.jobs.get(self.task_id) is self:
            del self.services.jobs[self.task_id]
        self.completion = None  # it refers to this driver
        self.messages.forget()
