"""Whether a process looks for results where the workers store them.

URLs cannot tell, because one server has several names. So each worker stores a marker, a result of no task, in its
result backend, and publishes the marker's id in its reports. A process that does not find the marker in its own
backend would wait for ever for each result, and a chord of two apps would never end.

`look` is for those who submit or wait: it looks on a thread, and logs what is wrong, once for each app and queue.
`petiole status` looks each time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from celery import Celery
from celery.states import SUCCESS

from petiole.contract.settings.urls import redacted
from petiole.tasks.app.application import App
from petiole.tasks.fleet import reports
from petiole.tasks.fleet.reports import WorkerReport

logger = logging.getLogger(__name__)

AGAIN_S = 30.0
"""How long after a look that found no worker, or no answer, the next one is made."""

_due_at: WeakKeyDictionary[Celery, dict[str | None, float]] = WeakKeyDictionary()


def elsewhere(app: Celery, workers: Sequence[WorkerReport]) -> list[WorkerReport]:
    """The live workers whose markers are not in the result backend of `app`. Raises the backend's errors."""
    marked = [worker for worker in workers if worker.result_marker and not worker.lost]
    return [worker for worker in marked if not _is_stored(app, worker.result_marker)]


def _is_stored(app: Celery, marker: str) -> bool:
    return bool(app.backend.get_task_meta(marker, cache=False)["status"] == SUCCESS)


def look(app: Celery, queue: str | None) -> None:
    """Look, unless it has been done. `queue`: where the app's tasks go; None if that is not known."""
    due_at = _due_at.setdefault(app, {})
    if time.monotonic() >= due_at.get(queue, 0.0):
        due_at[queue] = time.monotonic() + AGAIN_S
        threading.Thread(target=_look, args=(app, queue), name="petiole-markers", daemon=True).start()


def _look(app: Celery, queue: str | None) -> None:
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
    missing = elsewhere(app, serving)
    _due_at[app][queue] = math.inf
    if missing and (queue is not None or missing == serving):
        logger.error("%s", complaint(app, missing))


def complaint(app: Celery, workers: Sequence[WorkerReport]) -> str:
    """A line about workers that store results elsewhere."""
    names = ", ".join(worker.worker for worker in workers)
    setting, so = "PETIOLE_RESULT_BACKEND", ""
    if not isinstance(app, App):
        setting, so = f"result_backend of the app {app.main!r}", ", so a chord with them never ends"
    got = redacted(str(app.conf.result_backend or "disabled://"))
    missing = f"the results of {names} are not there{so}"
    return f"{setting}: must be the result backend of the workers, got {got}: {missing}"
