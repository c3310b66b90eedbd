"""This worker's reports for `petiole status`: see `tasks.fleet.reports`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import redis

from petiole.tasks.fleet import models, reports
from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.servers.connections import LOST
from petiole.tasks.worker.periodic import Periodic
from petiole.tasks.worker.reports.marker import Marker

logger = logging.getLogger(__name__)

_SAME = [name for name, field in reports.WorkerReport.model_fields.items() if reports.ENGINE in field.metadata]
_OF_STATES = re.compile(r"(states|snapshots)_\w+|state_(hit|missed)_tokens")
_OF_WINDOW = re.compile(r"window_(\d+)_(\w+)")
_OF_DRAFTS = re.compile(r"accepted_drafts_(\d+)")


def engine_figures(stats: dict[str, Any]) -> dict[str, Any]:
    """The engine's statistics as fields of a `WorkerReport`."""
    windows: dict[str, dict[str, int]] = {}
    for name, number in stats.items():
        if found := _OF_WINDOW.fullmatch(name):
            windows.setdefault(found[1], {})[found[2]] = number
    states = {name: number for name, number in stats.items() if _OF_STATES.fullmatch(name)}
    hit_rate = float(stats.get("prefix_hit_rate", 0.0))
    same = {field: stats[field] for field in _SAME if field in stats}
    drafts = {found[1]: number for name, number in stats.items() if (found := _OF_DRAFTS.fullmatch(name))}
    return {"hit_rate": hit_rate, "windows": windows, "states": states, "accepted_drafts": drafts, **same}


class GrowthRate:
    """By how much a count has grown since the last call, or since the beginning, a second."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._before, self._since = count(), time.monotonic()

    def __call__(self) -> float:
        now, count = time.monotonic(), self._count()
        rate = (count - self._before) / max(now - self._since, 1e-3)
        self._before, self._since = count, now
        return round(rate, 1)


class Reporter:
    """Reports every two seconds. `report()` returns a report, `facts()` what the model is and takes. They stay
    when the worker ends."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        worker: str,
        report: Callable[[], reports.WorkerReport],
        facts: Callable[[], ModelFacts],
        marker: Marker,
    ) -> None:
        self._client, self._worker, self._report = client, worker, report
        self._facts = facts
        self._forget_at = 0.0
        self._marker = marker
        self._thread = Periodic("petiole-report", self._try)

    def start(self) -> None:
        self._marker.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and remove the report, so that the worker is not shown as lost."""
        self._thread.stop()
        self._marker.stop()
        try:
            reports.withdraw(self._client, self._worker)
        except (*LOST, redis.RedisError):
            logger.debug("the report could not be withdrawn", exc_info=True)

    def _try(self) -> float:
        try:
            reports.report(self._client, self._report())
            if (facts := self._facts()).queues:
                models.publish(self._client, facts)
            if time.monotonic() >= self._forget_at:
                self._forget_at = time.monotonic() + reports.FORGET_INTERVAL_S
                reports.forget_lost(self._client)
                models.forget_old(self._client)
        except Exception as error:  # any exception: the next report tries again
            logger.debug("no report: %r", error, exc_info=True)
        return reports.REPORT_INTERVAL_S
