"""The threads that complete tasks: they run Celery's trace, which stores results and sends links and callbacks.

    publisher ──job──► queue ──batch──► one script call stores all results ──► Celery's trace, job by job

One call stores all successes that are queued together. The trace of each task then skips its store. Some tasks are
stored by their own trace: tasks with callbacks, in a chain or in a chord, because Celery sends callbacks before it
stores the result; tasks with a large result; and all tasks of a call that failed, unless the backend refused it.

No thread waits for a backend that is away or full: a refused outcome is parked, and a timer tries it again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from celery import states

from petiole.gpu_worker.threads.inbox import ThreadPool
from petiole.tasks.app.backend import refuses
from petiole.tasks.worker import scripts
from petiole.tasks.worker.completion.backend import RedisBackend, expires_of
from petiole.tasks.worker.completion.completion import Completion
from petiole.tasks.worker.completion.reports import NotStored
from petiole.tasks.worker.output.outcomes import Success

logger = logging.getLogger(__name__)

THREADS = 3
LATER_S = 1.0
_A_CALL = 16


class Completions:
    """Only Petiole's Redis backend stores batches."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._together = isinstance(app.backend, RedisBackend)
        self._finished: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._threads = ThreadPool(THREADS, "petiole-completion")
        self._later: list[Callable[[], object]] = []
        self._timer: threading.Timer | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` on one of the threads. After `close()`, `work` is dropped: the task's message goes back to
        the queue, and the next delivery completes the task."""
        self._threads.put(work)

    def take(self, completion: Completion) -> None:
        """Take the next step of a completion, together with others where that is possible."""
        if not (self._together and completion.storable):
            self.run(completion.take)
            return
        with self._lock:
            self._finished.append(completion)
            first = len(self._finished) == 1
        if first:
            self.run(self._complete_together)

    def run_later(self, work: Callable[[], object]) -> None:
        """Call `work` on one of the threads in `LATER_S`, together with everything that was put here meanwhile."""
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
        """Wait until all queued work is done. Parked work stays undone."""
        if self._timer is not None:
            self._timer.cancel()
        self._threads.close()

    def _complete_together(self) -> None:
        backend: RedisBackend = self._app.backend
        while batch := self._next_batch():
            try:
                store_together(backend, [completion.success for completion in batch])
            except Exception as error:
                if refuses(error):
                    for completion in batch:
                        completion.tell(NotStored(error))
                else:
                    logger.debug("%d results could not be stored together: %s", len(batch), error)
                    for completion in batch:
                        self.run(completion.take)
            else:
                with backend.having_stored([completion.task_id for completion in batch]):
                    for completion in batch:
                        completion.take()

    def _next_batch(self) -> list[Completion]:
        """The next batch. If more are queued, a task for another thread is added."""
        with self._lock:
            batch = [self._finished.popleft() for _ in range(min(len(self._finished), _A_CALL))]
            more = bool(self._finished)
        if more:
            self.run(self._complete_together)
        return batch


def store_together(backend: Any, successes: Sequence[Success]) -> None:
    """Store successes as Celery's backend does, in one call. Like Celery, never overwrite a stored success."""
    values, kept = {}, {}
    for task_id, result, context in successes:
        meta = backend._get_result_meta(result, states.SUCCESS, None, context)
        key = backend.get_key_for_task(task_id)
        values[key] = backend.encode({**meta, "task_id": task_id})
        own_s = expires_of(context)
        kept[key] = int(backend.expires or 0) if own_s is None else own_s
    keys = list(values)
    for key, stored in zip(keys, backend.client.mget(keys), strict=True):
        if stored and backend.decode_result(stored)["status"] == states.SUCCESS:
            del values[key]
    for expires_s in sorted({kept[key] for key in values}):  # nearly always one
        some = {key: value for key, value in values.items() if kept[key] == expires_s}
        scripts.load(backend.client, "store")(list(some), [expires_s, *some.values()])
