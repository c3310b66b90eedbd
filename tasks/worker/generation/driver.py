"""Drives one job: passes events to it, and carries out its effects.

Any thread may call `post`. The events of all jobs happen on one thread, in the order in which they were posted. An
effect never waits: work that waits for Redis runs on a completion thread, and changes of Celery's request are
posted to the consumer's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from petiole.gpu_worker.request import Request
from petiole.gpu_worker.threads.inbox import ThreadPool
from petiole.tasks.fleet import control
from petiole.tasks.settings import Settings
from petiole.tasks.wire.headers import Account
from petiole.tasks.worker.completion.reports import OtherDelivery, Report
from petiole.tasks.worker.completion.standby import Standby
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.attempt_spans import AttemptSpans
from petiole.tasks.worker.delivery.delivery import Delivery, Messages, TimeLimits
from petiole.tasks.worker.delivery.mailbox import Mailbox
from petiole.tasks.worker.generation import effects
from petiole.tasks.worker.generation.attempts import BeginReply, OutboxListener, RunningAttempt
from petiole.tasks.worker.generation.effects import Action, Effect, Event
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.generation.job import OVER, WRITING, Job, State
from petiole.tasks.worker.generation.presentation import Presentation, Presentations
from petiole.tasks.worker.generation.settlement import Settlement
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

    def remove(self, job: Job) -> None:
        """Another job of the same task stays."""
        if (driver := self.jobs.get(job.task_id)) is not None and driver.job is job:
            del self.jobs[job.task_id]


class JobDriver:
    """The driver of one job. Celery keeps it as the handle to terminate the task. Any thread may read `job`.

    `attempt` exists once it has begun and until the job is over, `spans` if the attempt is traced.
    """

    def __init__(self, services: Services, delivery: Delivery) -> None:
        self.services = services
        self.messages = Messages(delivery)
        self.job = Job(delivery.task_id, time.monotonic())
        self.settlement = Settlement(self.job, self.messages, services.completions, services.remove)
        self.attempt: RunningAttempt | None = None
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

    def post(self, event: Event) -> None:
        """Pass `event` to the job, and carry out the effects."""
        self.services.events.put(lambda: self._happen(event))

    def give_up(self, error: BaseException) -> None:
        self.post(partial(self.job.give_up, error))

    def _guarded(self, step: Callable[[], Event | None]) -> None:
        """A step on another thread, and the event that follows it. An exception gives the job up, so that its
        message is not held for ever."""
        try:
            if (event := step()) is not None:
                self.post(event)
        except Exception as error:
            self.give_up(error)

    # ------------------------------------------------------------ the thread of events

    def _happen(self, event: Event) -> None:
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
        services, job, settlement = self.services, self.job, self.settlement
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
                try:
                    self._begun.outbox.finish(outcome)
                except Exception as error:  # the outcome cannot be written as JSON
                    self.fault(error)
            case Action.FLAG:
                services.completions.run(partial(control.flag_cancel, job.task_id))
            case effects.Accept(at):
                self._on_consumer(partial(settlement.accept, at))
            case Action.STORE_STARTED:
                services.completions.run(partial(settlement.store_started, self.post))
            case effects.Count(outcome):
                services.tally.count(outcome)
            case effects.Complete(replay):
                settlement.complete(replay, self._told, self._on_consumer)
            case Action.GO_ON:
                settlement.go_on(self._on_consumer)
            case effects.Park(refusal):
                if refusal is not None:
                    logger.error("task %s: its outcome cannot be stored yet: %s", job.task_id, refusal)
                services.completions.run_later(partial(self.post, job.again))
            case Action.STAND_BY:
                lease_s = services.settings.visibility_timeout_s
                standby = Standby(
                    job.task_id, self.messages, services.mailbox, services.completions, lease_s, self._told
                )
                self._on_consumer(standby.watch)
            case effects.Settle():
                if job.parked_at is not None:
                    logger.warning("task %s: its outcome is stored", job.task_id)
                self._on_consumer(partial(settlement.settle, effect))
            case Action.LEAVE:
                self._on_consumer(settlement.leave)
            case Action.REQUEUE:
                self._on_consumer(settlement.requeue)
            case effects.GiveUp(error):
                self._drop(error)

    def _drop(self, error: BaseException) -> None:
        logger.error("task %s is given up here; its message is requeued", self.task_id, exc_info=error)
        if (attempt := self.attempt) is not None:
            attempt.drop()
        # Not at once, because the same error may happen again. Without effect at shutdown, when all unacknowledged
        # messages go back.
        self._on_consumer(self.settlement.forget)
        self.services.completions.run_later(lambda: self._on_consumer(self.messages.current.requeue))

    def _told(self, report: Report) -> None:
        if report is OtherDelivery.ANSWERED:  # on the consumer's thread
            self.settlement.forget()
        self.post(partial(self.job.reported, report, time.monotonic()))

    def _on_consumer(self, step: Callable[[], Event | None]) -> None:
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
            self.listener,
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

    def fault(self, error: Exception) -> None:
        """The task's data cannot be written, or its attempt cannot begin: the task fails, and its stream ends."""
        if (attempt := self.attempt) is not None:
            attempt.outbox.drop()
        self.listener.on_fault(error)

    @property
    def listener(self) -> OutboxListener:
        return OutboxListener(self.job, self.services.publisher, self.services.completions, self.post)

    # ------------------------------------------------------------ consumer's thread

    def rebind(self, delivery: Delivery) -> None:
        """The message came again after a lost connection: keep generating, and answer the new request object."""
        if (event := self.settlement.rebind(delivery)) is not None:
            self.post(event)

    def stop(self, ending: Ending) -> None:
        """Cancel the generation, because the task was revoked or has expired."""
        self.post(partial(self.job.stop, ending))

    def terminate(self, signum: object = None) -> None:
        """Called by Celery when the worker shuts down."""
        self.hand_back()

    def hand_back(self) -> None:
        """Let another worker resume the task. The job is over once all output of this attempt is in the log."""
        self.post(self.job.hand_back)
