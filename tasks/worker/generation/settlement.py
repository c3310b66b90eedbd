"""A job's task as Celery has it: accepted, started, completed, and its message settled.

A step that belongs to the consumer's thread says so. An event that follows a step is the step's result: whoever
runs the step posts the event to the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from petiole.tasks.worker.completion.backend import store_started
from petiole.tasks.worker.completion.completion import Completion
from petiole.tasks.worker.completion.reports import Report
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.delivery import Delivery, Messages
from petiole.tasks.worker.generation import effects
from petiole.tasks.worker.generation.effects import Event
from petiole.tasks.worker.generation.job import Job

OnConsumer = Callable[[Callable[[], Event | None]], None]
"""Runs a step on the consumer's thread."""


@dataclass
class Settlement:
    """Tells Celery how a job's task fares, and answers the task's messages.

    `completion` exists while the task is completed. `remove` takes the job out of the worker's books.
    """

    job: Job
    messages: Messages
    completions: Completions
    remove: Callable[[Job], None]
    completion: Completion | None = None

    def store_started(self, post: Callable[[Event], None]) -> None:
        """Have Celery store STARTED. Runs on a completion thread."""
        request = self.messages.current.request
        try:
            if self.job.outcome is None and not request.ignore_result:
                meta = {"pid": os.getpid(), "hostname": request.hostname}
                store_started(request.task.backend, self.job.task_id, meta, request._context)
        finally:
            post(self.job.started_stored)

    def complete(self, replay: bool, tell: Callable[[Report], object], on_consumer: OnConsumer) -> None:
        """Begin to report the outcome of the task. `tell` is called with what has come of it."""
        assert self.job.outcome is not None
        self.completion = Completion(
            self.job.task_id,
            self.messages,
            self.job.outcome,
            replay=replay,
            hard_limit_s=self.job.limit_s("hard"),
            tell=tell,
            hand_on=partial(self.go_on, on_consumer),
        )
        self.go_on(on_consumer)

    def go_on(self, on_consumer: OnConsumer) -> None:
        """Take the next step of the completion, on a thread that may take it."""
        if (completion := self.completion) is None:  # the job was given up
            return
        if completion.for_consumer:
            on_consumer(completion.take)
        else:
            self.completions.take(completion)

    # ------------------------------------------------------------ consumer's thread

    def accept(self, at: float) -> Event:
        """Report that the task began at `at` (of `time.monotonic`), unless it was revoked or has expired."""
        delivery = self.messages.current
        delivery.begun()
        delivery.request.revoked()  # or expired, while it waited in the engine
        if delivery.request.ending is not None:
            return partial(self.job.stop, delivery.request.ending)
        self.messages.accept(at)
        return self.job.accepted

    def rebind(self, delivery: Delivery) -> Event | None:
        """The message came again after a lost connection: answer the new request object."""
        if not self.messages.add(delivery):
            return None
        if self.messages.accepted_at is not None:
            delivery.begun()
        ending = delivery.request.ending
        return None if ending is None else partial(self.job.stop, ending)

    def settle(self, how: effects.Settle) -> None:
        self.forget()
        if how.soft_limit_s is not None:
            self.messages.current.timeout_callback(True, how.soft_limit_s)
        self.messages.current.callback((how.failed, how.value, how.runtime_s))

    def leave(self) -> None:
        """Acknowledge the message: another delivery has reported the outcome."""
        self.forget()
        self.messages.current.acknowledge()

    def requeue(self) -> None:
        self.forget()
        self.messages.current.requeue()

    def forget(self) -> None:
        self.remove(self.job)
        self.completion = None  # it refers to the driver
        self.messages.forget()
