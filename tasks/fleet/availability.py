"""Tells waiting callers whether a worker serves their queue: a misspelt queue must not look like a slow model.

`lack` and `pause` are the rules. A `QueueWatch` belongs to one caller who waits for some tasks. When nothing has
come for `SILENCE_S`, a thread reads the workers' reports, for all callers of the process together. It logs a
warning if no worker serves a queue that somebody waits for, or if all workers of the queue are paused: one for
each queue and outage, however many wait. The caller neither waits for that thread nor fails with it. If the
reports cannot be read, because Redis is elsewhere or this user has no right to read them, nothing is logged.

`look_for_results` tells whoever submits or waits whether this process looks for results where the workers store
them. URLs cannot tell, because one server has several names. So each worker stores a marker, a result of no task,
in its result backend, and publishes the marker's id in its reports. A process that does not find the marker in its
own backend would wait for ever for each result, and a chord of two apps would never end. It looks on a thread, and
logs what is wrong, once for each app and queue. `petiole status` looks each time."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import redis
from celery import Celery
from celery.states import SUCCESS

from petiole.contract.settings.urls import redacted
from petiole.tasks.app.application import App, app as celery_app
from petiole.tasks.errors import InvalidRequest, NoWorker, Unavailable
from petiole.tasks.fleet import reports
from petiole.tasks.fleet.reports import LOST_AFTER_S, WorkerReport
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import WORKERS_KEY, is_own

logger = logging.getLogger(__name__)


SILENCE_S = 3.0
"""How long a caller waits before a thread reads the reports, and between two readings; or half of the caller's own
timeout, if that is shorter."""


def lack(workers: Sequence[WorkerReport], queue: str | None) -> str | None:
    """A message about a queue that no live worker serves; None if one serves it. Queue None stands for any
    queue."""
    live = [worker for worker in workers if not worker.lost]
    if any(queue is None or queue in worker.queues for worker in live):
        return None
    which = "any queue" if queue is None else f"queue {queue!r}"
    seen = [worker.age_s for worker in workers if worker.age_s is not None and queue in (None, *worker.queues)]
    known = f"no worker has served {which} for {min(seen):.0f} s" if seen else f"no worker serves {which}"
    served = Counter(name for worker in live for name in worker.queues if not is_own(name))
    others = ", ".join(f"{name} ({number})" for name, number in sorted(served.items())) or "none"
    if silenced := sorted(worker.worker for worker in live if worker.state == "silenced"):
        takers = f"{', '.join(silenced)}: silenced until `add_consumer` names a queue"
        return f"no worker serves {which} ({takers}); queues with workers: {others}"
    return f"{known}; queues with workers: {others}"


def pause(workers: Sequence[WorkerReport], queue: str | None) -> str | None:
    """A message about a queue whose live workers are all paused."""
    serving = [worker for worker in workers if not worker.lost and (queue is None or queue in worker.queues)]
    if not serving or any(worker.state != "paused" for worker in serving):
        return None
    names = ", ".join(sorted(worker.worker for worker in serving))
    which = "every queue" if queue is None else f"queue {queue!r}"
    return f"all workers of {which} are paused: {names}"


def require(queue: str) -> None:
    """Raises `NoWorker` if no live worker serves the queue, `Unavailable` if Redis does not answer, and
    `InvalidRequest` if this user may not read the workers' reports."""
    try:
        missing = lack(reports.workers(), queue)
    except redis.exceptions.NoPermissionError as error:
        raise InvalidRequest("require_worker", f"needs the right to read {WORKERS_KEY}", str(error)) from None
    except connections.LOST as error:
        raise Unavailable(redacted(settings().streams_url), str(error)) from None
    if missing:
        raise NoWorker(missing, LOST_AFTER_S)


class AvailabilityRouter:
    """Celery's router, asked once for each submission. `queue`: where it sent the task."""

    queue: str | None = None

    def __init__(self, router: Any, require_worker: bool) -> None:
        self._router, self._require_worker = router, require_worker

    def route(self, options: Any, name: str, *args: Any, **more: Any) -> Any:
        routed = self._router.route(options, name, *args, **more)
        self.queue = getattr(routed.get("queue"), "name", None)
        if self._require_worker and self.queue is not None:
            require(self.queue)
        return routed


class QueueWatch:
    """Watches for one caller, who waits for tasks on these queues; None stands for an unknown queue.
    `timeout_s`: the silence after which the caller gives up."""

    def __init__(self, queues: Iterable[str | None], timeout_s: float | None = None) -> None:
        self._queues = set(queues)
        self._interval_s = SILENCE_S if timeout_s is None else min(SILENCE_S, timeout_s / 2)
        self._look_at = time.monotonic() + self._interval_s

    def heard(self) -> None:
        """Something has come: the silence begins again."""
        self._look_at = time.monotonic() + self._interval_s

    def silent(self) -> None:
        """Nothing has come. Called about once a second. Has the reports read when it is time."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._interval_s
            if self._queues:
                _monitor.look(self._queues)
            for queue in self._queues or {None}:
                look_for_results(celery_app, queue)


class AvailabilityMonitor:
    """Reads the workers' reports for all callers of a process, and logs what is wrong with their queues: once,
    until it is right again."""

    def __init__(self) -> None:
        self._asked: set[str | None] = set()
        self._told: set[str | None] = set()
        self._looking = threading.Lock()

    def look(self, queues: Iterable[str | None]) -> None:
        """Have a thread look after these queues, unless one is about to read the reports anyway."""
        self._asked.update(queues)
        if self._looking.acquire(blocking=False):
            threading.Thread(target=self._look, name="petiole-watch", daemon=True).start()

    def _look(self) -> None:
        asked, self._asked = self._asked, set()
        try:
            self.judge(reports.workers(), asked)
        except Exception as error:
            logger.debug("cannot tell whether a worker serves %s: %s", asked, error)
        finally:
            self._looking.release()

    def judge(self, workers: Sequence[WorkerReport], queues: Iterable[str | None]) -> None:
        """Log a warning for each queue with something wrong that was not told yet."""
        for queue in queues:
            reason = lack(workers, queue) or pause(workers, queue)
            if reason is None:
                self._told.discard(queue)
            elif queue not in self._told:
                self._told.add(queue)
                logger.warning("%s", reason)


_monitor = AvailabilityMonitor()


def _after_fork() -> None:
    global _monitor
    _monitor = AvailabilityMonitor()  # a thread of the parent may have been looking


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


AGAIN_S = 30.0
"""How long after a look that found no worker, or no answer, the next one is made."""

_due_at: WeakKeyDictionary[Celery, dict[str | None, float]] = WeakKeyDictionary()


def storing_elsewhere(app: Celery, workers: Sequence[WorkerReport]) -> list[WorkerReport]:
    """The live workers whose markers are not in the result backend of `app`. Raises the backend's errors."""
    marked = [worker for worker in workers if worker.result_marker and not worker.lost]
    return [worker for worker in marked if not _is_stored(app, worker.result_marker)]


def _is_stored(app: Celery, marker: str) -> bool:
    return bool(app.backend.get_task_meta(marker, cache=False)["status"] == SUCCESS)


def look_for_results(app: Celery, queue: str | None) -> None:
    """Look, unless it has been done. `queue`: where the app's tasks go; None if that is not known."""
    due_at = _due_at.setdefault(app, {})
    if time.monotonic() >= due_at.get(queue, 0.0):
        due_at[queue] = time.monotonic() + AGAIN_S
        threading.Thread(target=_look_for_results, args=(app, queue), name="petiole-markers", daemon=True).start()


def _look_for_results(app: Celery, queue: str | None) -> None:
    try:
        _tell(app, queue, reports.workers())
    except Exception as error:  # any backend's: it is no answer
        logger.debug("cannot tell where the results of the workers are: %r", error)


def _tell(app: Celery, queue: str | None, workers: Sequence[WorkerReport]) -> None:
    """Log an error if the workers of `queue` store results elsewhere, once. If the queue is not known: if all
    workers do."""
    serving = [one for one in workers if one.result_marker and not one.lost and queue in (None, *one.queues)]
    if not serving:
        return
    missing = storing_elsewhere(app, serving)
    _due_at[app][queue] = math.inf
    if missing and (queue is not None or missing == serving):
        logger.error("%s", complaint_of_results(app, missing))


def complaint_of_results(app: Celery, workers: Sequence[WorkerReport]) -> str:
    """A line about workers that store results elsewhere."""
    names = ", ".join(worker.worker for worker in workers)
    setting, so = "PETIOLE_RESULT_BACKEND", ""
    if not isinstance(app, App):
        setting, so = f"result_backend of the app {app.main!r}", ", so a chord with them never ends"
    got = redacted(str(app.conf.result_backend or "disabled://"))
    missing = f"the results of {names} are not there{so}"
    return f"{setting}: must be the result backend of the workers, got {got}: {missing}"
