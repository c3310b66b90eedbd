"""The threads on which tasks are completed: Celery's own trace, the result backend, links and callbacks.

    publisher ──job──► what has piled up ──► one call of Redis stores it all ──► Celery's trace, one by one

Successes that come together are stored together, and Celery's trace then finds each of them stored. A task with
callbacks, or in a chain or a chord, is traced by itself: callbacks are sent before a result is stored. So is one
with a large result, and every task of a call that failed, with Celery's patience and its errors.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from celery import states

from gpu_worker.threads import Threads
from tasks.backend import RedisBackend
from tasks.worker import scripts
from tasks.worker.results import Success

if TYPE_CHECKING:
    from tasks.worker.job import Job

logger = logging.getLogger(__name__)

THREADS = 3
_JOBS_A_CALL = 16


class Completions:
    """`app` has a result backend for each thread. Any other than Petiole's for Redis stores result by result."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._together = isinstance(app.backend, RedisBackend)
        self._finished: deque[Job] = deque()
        self._lock = threading.Lock()
        self._threads = Threads(THREADS, "petiole-completion")

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` on one of the threads. Not once they are closed: then the task's message goes back to the
        queue, and its next delivery completes it."""
        self._threads.put(work)

    def complete(self, job: Job) -> None:
        """Store and trace what `job` has come to. Its end is in the log."""
        if not (self._together and job.plain):
            self.run(job.complete)
            return
        with self._lock:
            self._finished.append(job)
            first = len(self._finished) == 1
        if first:
            self.run(self._complete_together)

    def close(self) -> None:
        """Wait until everything is completed."""
        self._threads.close()

    def _complete_together(self) -> None:
        backend: RedisBackend = self._app.backend
        while jobs := self._some():
            try:
                store_together(backend, [job.success for job in jobs])
            except Exception as error:
                logger.debug("%d results could not be stored together: %s", len(jobs), error)
                for job in jobs:
                    self.run(job.complete)
            else:
                with backend.having_stored([job.task_id for job in jobs]):
                    for job in jobs:
                        job.complete()

    def _some(self) -> list[Job]:
        """Some of the finished jobs. If there are more, another thread is called for."""
        with self._lock:
            jobs = [self._finished.popleft() for _ in range(min(len(self._finished), _JOBS_A_CALL))]
            more = bool(self._finished)
        if more:
            self.run(self._complete_together)
        return jobs


def store_together(backend: Any, successes: Sequence[Success]) -> None:
    """What Celery does for each success by itself, and like it: never over another success."""
    values = {}
    for task_id, result, context in successes:
        meta = backend._get_result_meta(result, states.SUCCESS, None, context)
        values[backend.get_key_for_task(task_id)] = backend.encode({**meta, "task_id": task_id})
    keys = list(values)
    for key, stored in zip(keys, backend.client.mget(keys), strict=True):
        if stored and backend.decode_result(stored)["status"] == states.SUCCESS:
            del values[key]
    if values:
        scripts.load(backend.client, "store")(list(values), [int(backend.expires or 0), *values.values()])
