"""Foreign tasks, which are the app's tasks other than generations. They run on threads, as in Celery's
`threads` pool.

They share the worker's prefetch with the generations, so many long ones should have their own queue and worker.
Their time limits are not enforced, and a running one cannot be terminated, because a thread cannot be killed.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from billiard.einfo import ExceptionInfo

from tasks.worker.delivery import Delivery
from tasks.worker.mailbox import Callback, Mailbox

THREADS = 4


class ForeignTask:
    """A foreign task; the handle that Celery keeps a weak reference to. `ForeignTasks.running` keeps it alive."""

    def __init__(self, tasks: ForeignTasks, delivery: Delivery) -> None:
        self._tasks, self._delivery = tasks, delivery

    def terminate(self, signal: object = None) -> None:
        """Does nothing: a thread cannot be killed."""

    def run(self) -> None:
        delivery, mailbox = self._delivery, self._tasks.mailbox
        if self._tasks.closed:
            return
        accepted = time.monotonic()
        mailbox.post(lambda: delivery.accept_callback(os.getpid(), accepted))
        mailbox.post(self._end())
        self._tasks.running.discard(self)

    def _end(self) -> Callback:
        """Run the task. The returned callback reports its outcome to Celery."""
        delivery, began = self._delivery, time.monotonic()
        try:
            outcome = delivery.target(*delivery.args)
        except Exception:
            outcome = True, ExceptionInfo(), time.monotonic() - began
        except BaseException as error:  # such as SystemExit, which Celery's trace does not store
            failure = _failure(f"the task raised {error!r}")
            return lambda: delivery.request.on_failure(failure)

        def settle() -> None:
            try:
                delivery.callback(outcome)
            except MemoryError:  # raised by the task and stored: Celery does not acknowledge it
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
        """Start no more tasks. Running ones are not waited for: their messages go back to the queue."""
        self.closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
