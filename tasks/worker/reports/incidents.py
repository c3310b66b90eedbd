"""Counts of incidents since the start of this process, for its reports. Any thread may count."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, Literal

Incident = Literal[
    "resumed_attempts",
    "lost_leases",
    "deaths",
    "redeliveries",
    "quarantined",
    "failed_chords",
    "redis_changes",
]
"""resumed_attempts: tasks that an earlier delivery had begun; lost_leases: leases on tasks that this worker lost;
deaths: owners of tasks whose messages this worker has given back; redeliveries: messages that were marked as
redelivered; quarantined: messages that were refused; failed_chords: chords whose body this worker has found that
it will not run; redis_changes: another Redis process answered than before."""


class Incidents:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Incident] = Counter()
        self._server, self._changed_at = "", 0.0

    def count(self, incident: Incident, times: int = 1) -> None:
        with self._lock:
            self._counts[incident] += times

    def saw_server(self, run: str) -> None:
        """The broker's Redis has this id of its run; empty: it does not say."""
        with self._lock:
            if run and self._server not in ("", run):
                self._counts["redis_changes"] += 1
                self._changed_at = time.monotonic()
            self._server = run or self._server

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`."""
        with self._lock:
            counted: dict[str, Any] = {incident: count for incident, count in self._counts.items() if count}
            if self._changed_at:
                counted["redis_changed_s"] = round(time.monotonic() - self._changed_at, 1)
            return counted


incidents = Incidents()
"""This process's."""
