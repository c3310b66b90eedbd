"""This worker's reports for `petiole status`: see `tasks.fleet`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from tasks import fleet
from tasks.connections import LOST

logger = logging.getLogger(__name__)

_SAME = {
    *("model", "device", "slots", "running", "waiting", "preemptions"),
    *("pages_total", "pages_free", "pages_cached"),
    *("prompt_tokens", "generated_tokens", "draft_tokens", "accepted_draft_tokens"),
}


def engine_figures(stats: dict[str, Any]) -> dict[str, Any]:
    """The engine's statistics as fields of a `WorkerReport`."""
    hit_rate = float(stats.get("prefix_hit_rate", 0.0))
    return {"hit_rate": hit_rate, **{field: stats[field] for field in _SAME if field in stats}}


class Reporter:
    """The reporting thread. `report(tokens_per_s)` returns a report, `tokens()` the number of tokens so far."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        worker: str,
        report: Callable[[float], fleet.WorkerReport],
        tokens: Callable[[], int],
    ) -> None:
        self._client, self._worker, self._report, self._tokens = client, worker, report, tokens
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petiole-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, and remove the report, so that the worker is not shown as lost."""
        self._stopped.set()
        self._thread.join(2.0)
        try:
            fleet.withdraw(self._client, self._worker)
        except (*LOST, redis.RedisError):
            logger.debug("the report could not be withdrawn", exc_info=True)

    def _run(self) -> None:
        before, since = self._tokens(), time.monotonic()
        rate = 0.0
        while True:
            try:
                fleet.report(self._client, self._report(rate))
            except Exception as error:  # of any kind: the next report tries again
                logger.debug("no report: %r", error, exc_info=True)
            if self._stopped.wait(fleet.REPORT_INTERVAL_S):
                return
            now, count = time.monotonic(), self._tokens()
            rate = (count - before) / (now - since)
            before, since = count, now
