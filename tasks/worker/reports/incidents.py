"""Counts of incidents since the start of this process, for its reports. Any thread may count."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Literal

Incident = Literal["resumed_attempts", "lost_leases", "deaths", "redeliveries", "quarantined", "failed_chords"]
"""resumed_attempts: tasks that an earlier delivery had begun; lost_leases: leases on tasks that this worker lost;
deaths: owners of tasks whose messages this worker has given back; redeliveries: messages that were marked as
redelivered; quarantined: messages that were refused; failed_chords: chords whose body this worker has found that
it will not run."""


class Incidents:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Incident] = Counter()

    def count(self, incident: Incident, times: int = 1) -> None:
        with self._lock:
            self._counts[incident] += times

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`."""
        with self._lock:
            return {incident: count for incident, count in self._counts.items() if count}


incidents = Incidents()
"""This process's."""
