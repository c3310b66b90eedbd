"""The threads that complete tasks: they run Celery's trace, which stores results and sends links and callbacks.

    publisher ──job──► queue ──batch──► one script call stores all results ──► Celery's trace, job by job

Successes that are queued together are stored by one call, and the trace of each then skips its store. A task with
callbacks, or in a chain or a chord, is stored by its own trace, because Celery sends callbacks before it stores
the result. So is a task with a large result, and every task of a call that failed, unless the backend refused it.

No thread waits for a backend that is away or full: what it refuses is parked, and tried again by a timer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from celery import states

from petiole.gpu_worker.threads.pool import Threads
from petiole.tasks.app.backend import RedisBackend, refuses
from petiole.tasks.worker import scripts
from petiole.tasks.worker.output.outcomes import Success

logger = logging.getLogger(__name__)

THREADS = 3
LATER_S = 1.0
_JOBS_A_CALL = 16


class Finished(Protocol):
    """A job whose last delta is in the log."""

    @property
    def task_id(self) -> str: ...

    @property
    def plain(self) -> bool:
        """Whether its result may be stored in a batch."""
        ...

    @property
    def success(self) -> Success: ...

    def complete(self) -> None: ...

    def park(self, reason: BaseException, again: Callable[[], object]) -> None:
        """The result backend refuses the outcome: try `again` later."""
        ...


class Completions:
    """Only Petiole's Redis backend stores batches."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._together = isinstance(app.backend, RedisBackend)
        self._finished: deque[Finished] = deque()
        self._lock = threading.Lock()
        self._threads = Threads(THREADS, "petiole-completion")
        self._later: list[Callable[[], object]] = []
        self._timer: threading.Timer | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` on one of the threads. After `close()` it is dropped: the task's message goes back to the
        queue, and its next delivery completes it."""
        self._threads.put(work)

    def complete(self, job: Finished) -> None:
        """Store and trace the outcome of `job`, whose last delta is in the log."""
        if not (self._together and job.plain):
            self.run(job.complete)
            return
        with self._lock:
            self._finished.append(job)
            first = len(self._finished) == 1
        if first:
            self.run(self._complete_together)

    def run_later(self, work: Callable[[], object]) -> None:
        """Call `work` on one of the threads in `LATER_S`, with all that was put here meanwhile."""
        with self._lock:
            self._later.append(work)
            if len(self._later) == 1:
                self._timer = threading.Timer(LATER_S, self._run_parked)
                self._timer.daemon = True
                self._timer.start()

    def _run_parked(self) -> None:
        with self._lock:
            parked, self._later = self._later, []
        for work in parked:
            self.run(work)

    def close(self) -> None:
        """Wait until all queued work is done. What is parked stays undone."""
        if self._timer is not None:
            self._timer.cancel()
        self._threads.close()

    def _complete_together(self) -> None:
        backend: RedisBackend = self._app.backend
        while jobs := self._next_batch():
            try:
                store_together(backend, [job.success for job in jobs])
            except Exception as error:
                if refuses(error):
                    for job in jobs:
                        job.park(error, partial(self.complete, job))
                else:
                    logger.debug("%d results could not be stored together: %s", len(jobs), error)
                    for job in jobs:
                        self.run(job.complete)
            else:
                with backend.having_stored([job.task_id for job in jobs]):
                    for job in jobs:
                        job.complete()

    def _next_batch(self) -> list[Finished]:
        """The next batch of finished jobs. If more are queued, a task for another thread is added."""
        with self._lock:
            jobs = [self._finished.popleft() for _ in range(min(len(self._finished), _JOBS_A_CALL))]
            more = bool(self._finished)
        if more:
            self.run(self._complete_together)
        return jobs


def store_together(backend: Any, successes: Sequence[Success]) -> None:
    """Store successes as Celery's backend does, in one call. Like Celery, never overwrite a stored success."""
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
