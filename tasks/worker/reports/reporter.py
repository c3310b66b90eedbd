"""This worker's reports for `petiole status`: see `tasks.fleet.reports`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from petiole.tasks.fleet import reports
from petiole.tasks.servers.connections import LOST

logger = logging.getLogger(__name__)

_SAME = {
    *("model", "device", "slots", "running", "waiting", "preemptions"),
    *("steps", "evicted_pages", "zombie_outputs"),
    *("encoded_images", "image_hits", "encode_s"),
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
        report: Callable[[float], reports.WorkerReport],
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
            reports.withdraw(self._client, self._worker)
        except (*LOST, redis.RedisError):
            logger.debug("the report could not be withdrawn", exc_info=True)

    def _run(self) -> None:
        before, since = self._tokens(), time.monotonic()
        rate, forget_at = 0.0, since
        while True:
            try:
                reports.report(self._client, self._report(rate))
                if time.monotonic() >= forget_at:
                    forget_at = time.monotonic() + reports.FORGET_INTERVAL_S
                    reports.forget_lost(self._client)
            except Exception as error:  # of any kind: the next report tries again
                logger.debug("no report: %r", error, exc_info=True)
            if self._stopped.wait(reports.REPORT_INTERVAL_S):
                return
            now, count = time.monotonic(), self._tokens()
            rate = (count - before) / (now - since)
            before, since = count, now
