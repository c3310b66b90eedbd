"""A generation's request, as Celery's worker sees it: that it was revoked, or has expired, is noted first and
announced later.

Celery stores REVOKED the moment it hears of a revocation. But the task's stream, which may have been begun by
another worker, has no end then; and should this worker die before the acknowledgement, the next one that has
never heard of the revocation goes on to a success. So a revocation is an end like any other: the job writes it
into the stream first, where only the attempt that owns the task can, and then lets Celery announce it.
"""

from __future__ import annotations

import signal
from typing import Any, Literal

from celery.worker.request import Request as StockRequest

Ending = Literal["revoked", "expired"]
"""Why a task ends without a result. The `stop_reason` of its last delta, whose finish reason is `cancelled`."""


class Request(StockRequest):  # type: ignore[misc]
    ending: Ending | None = None

    def revoked(self) -> bool:
        """It is taken even so: its job ends the stream, and answers for it."""
        if self.ending is None:
            super().revoked()
        return False

    def _announce_revoked(self, reason: str, terminated: bool, signum: int | None, expired: bool) -> None:
        self.ending = "expired" if expired else "revoked"

    def terminate(self, pool: Any, signal: object = None) -> None:
        self.ending = self.ending or "revoked"
        if self._apply_result is not None and (job := self._apply_result()) is not None:
            job.stop(self.ending)

    def announce(self, ending: str, *, running: bool) -> None:
        """The state REVOKED, the event, the signal, and the acknowledgement."""
        if ending == "revoked" and running:
            super()._announce_revoked("terminated", True, signal.SIGTERM, False)
        else:
            super()._announce_revoked(ending, False, None, ending == "expired")
