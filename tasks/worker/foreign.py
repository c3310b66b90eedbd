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
from tasks.worker.mailbox import Mailbox

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
        try:
            outcome = delivery.target(*delivery.args)
        except BaseException:
            outcome = True, ExceptionInfo(), time.monotonic() - accepted
        mailbox.post(lambda: delivery.callback(outcome))
        self._tasks.running.discard(self)


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
