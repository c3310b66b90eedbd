"""Tells waiting callers whether a worker serves their queue: a misspelt queue must not look like a slow model.

`lack` is the rule. A `Watch` belongs to one caller who waits for some tasks. When nothing has come for
`SILENCE_S`, a thread reads the workers' reports, and logs one warning if no worker serves the queue. The caller
neither waits for that thread nor fails with it. If the reports cannot be read, because Redis is elsewhere or this
user has no right to read them, nothing is logged."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from petiole.tasks.errors import NoWorker
from petiole.tasks.fleet import reports
from petiole.tasks.fleet.reports import LOST_AFTER_S, WorkerReport

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
"""How long a caller waits before a thread reads the reports, and between two readings."""

_looking = threading.Lock()


def lack(workers: Sequence[WorkerReport], queue: str | None) -> str | None:
    """A message about a queue that no live worker serves; None if one serves it. Queue None stands for any
    queue."""
    live = [worker for worker in workers if not worker.lost]
    if any(queue is None or queue in worker.queues for worker in live):
        return None
    seen = [worker.age_s for worker in workers if worker.age_s is not None and queue in (None, *worker.queues)]
    since = f" for {min(seen):.0f} s" if seen else " within the last hour"
    served = Counter(name for worker in live for name in worker.queues)
    others = ", ".join(f"{name} ({number})" for name, number in sorted(served.items())) or "none"
    which = "any queue" if queue is None else f"queue {queue!r}"
    return f"no worker has served {which}{since}; queues with workers: {others}"


def require(queue: str) -> None:
    """Raises `NoWorker` if no live worker serves the queue."""
    if missing := lack(reports.workers(), queue):
        raise NoWorker(missing, LOST_AFTER_S)


class Router:
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


class Watch:
    """Watches for one caller, who waits for tasks on these queues; None stands for an unknown queue."""

    def __init__(self, queues: Iterable[str | None]) -> None:
        self._queues = set(queues)
        self._look_at = time.monotonic() + SILENCE_S
        self._done = not self._queues

    def heard(self) -> None:
        """Something has come: the silence begins again."""
        self._look_at = time.monotonic() + SILENCE_S

    def silent(self) -> None:
        """Nothing has come. Called about once a second. Reads the reports when it is time."""
        if not self._done and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + SILENCE_S
            threading.Thread(target=self._look, name="petiole-watch", daemon=True).start()

    def _look(self) -> None:
        if not _looking.acquire(blocking=False):  # another caller's look: this one is due again
            return
        try:
            workers = reports.workers()
        except Exception as error:
            logger.debug("cannot look whether a worker serves %s: %s", self._queues, error)
            self._done = True
        else:
            for queue in self._queues:
                if missing := lack(workers, queue):
                    self._done = True
                    logger.warning("%s", missing)
        finally:
            _looking.release()
