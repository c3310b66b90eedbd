"""This worker's marker in the result backend: see `tasks.fleet.availability`."""

from __future__ import annotations

import logging
import threading
from uuid import uuid4

from celery import Celery
from celery.states import SUCCESS

from petiole.tasks.wire.keys import MARKER_PREFIX
from petiole.tasks.worker.idempotency import tried
from petiole.tasks.worker.periodic import JOIN_S, Periodic

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""How often the marker is stored, in case the backend has lost it. Results, and so the marker, expire later."""


class Marker:
    """Stores the marker, on a thread: the result backend may be away while the reports' Redis is there."""

    name = ""
    """Empty until the marker has been stored."""

    def __init__(self, app: Celery) -> None:
        self._app, self._name = app, f"{MARKER_PREFIX}{uuid4()}"
        self._thread = Periodic("petiole-marker", self._try)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, and remove the marker. A backend that does not answer delays this by `JOIN_S` at most."""
        self._thread.stop()
        if self.name:
            removal = threading.Thread(target=self._remove, name="petiole-marker-end", daemon=True)
            removal.start()
            removal.join(JOIN_S)

    def _remove(self) -> None:
        try:
            self._app.backend.forget(self._name)
        except Exception as error:  # any backend's: the marker expires
            logger.debug("the marker was not removed: %r", error)

    def _try(self) -> float:
        try:
            with tried(self._name):  # Celery would log a traceback, and sleep, for each of its own retries
                self._app.backend.store_result(self._name, None, SUCCESS)
            self.name = self._name
        except Exception as error:  # any backend's: the next call tries again
            logger.debug("no marker: %r", error)
        return AGAIN_S
