"""Tasks of the same app that are no generations: a few threads of their own, as in Celery's `threads` pool.

They share the worker's prefetch with the generations, so a flood of long ones is better given a queue and a worker
of its own. Time limits are not enforced on them, and a running one cannot be terminated: a thread cannot be
killed.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from billiard.einfo import ExceptionInfo

from tasks.worker.delivery import Delivery
from tasks.worker.mailbox import Letter, Mailbox

THREADS = 4


class ForeignTask:
    """What Celery holds of a foreign task. Strongly referenced by the thread that runs it."""

    def __init__(self, tasks: ForeignTasks, delivery: Delivery) -> None:
        self._tasks, self._delivery = tasks, delivery

    def terminate(self, signal: object = None) -> None:
        """Cannot be."""

    def run(self) -> None:
        delivery, mailbox = self._delivery, self._tasks.mailbox
        if self._tasks.closed:
            return
        accepted = time.monotonic()
        mailbox.post(lambda: delivery.accept_callback(os.getpid(), accepted))
        mailbox.post(self._end())
        self._tasks.running.discard(self)

    def _end(self) -> Letter:
        """Do the work; what Celery's request is then told of it."""
        delivery, began = self._delivery, time.monotonic()
        try:
            outcome = delivery.target(*delivery.args)
        except Exception:
            outcome = True, ExceptionInfo(), time.monotonic() - began
        except BaseException as error:  # such as sys.exit(): a failure that Celery's trace has not stored
            failure = _failure(f"the task raised {error!r}")
            return lambda: delivery.request.on_failure(failure)

        def settle() -> None:
            try:
                delivery.callback(outcome)
            except MemoryError:  # the task's own, which is stored: Celery has no acknowledgement for it
                delivery.request.acknowledge()

        return settle


def _failure(what: str) -> ExceptionInfo:
    try:
        raise RuntimeError(what)
    except RuntimeError:
        return ExceptionInfo()


class ForeignTasks:
    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.running: set[ForeignTask] = set()
        self.closed = False
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="petiole-task")

    def apply(self, delivery: Delivery) -> ForeignTask:
        task = ForeignTask(self, delivery)
        self.running.add(task)
        self._threads.submit(task.run)
        return task

    def close(self) -> None:
        """Start no more of them. What runs is not waited for: its message goes back to the queue."""
        self.closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
