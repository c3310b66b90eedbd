"""The heartbeat file: its modification time says when the engine last made progress.

A supervisor's probe on the same machine reads it. It depends on nothing else, above all not on Redis: a probe that
asks over the broker would restart all workers of a fleet while Redis is away. The file is missing until the model
is loaded.

Beside it lies a file whose name ends in `READY`, while the worker takes tasks: not while it is paused, drains, or
takes from no queue.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from petiole.tasks.worker.outage import Outage
from petiole.tasks.worker.periodic import Periodic

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""How often the file is written."""
READY = ".ready"


class Heartbeat:
    """Writes the files, from `start` until the process ends. `age_s`: how long ago the engine made progress.
    `ready`: whether the worker takes tasks."""

    def __init__(self, path: Path, age_s: Callable[[], float], ready: Callable[[], bool] = lambda: True) -> None:
        self._path, self._age_s, self._ready = path, age_s, ready
        failing, recovered = "the heartbeat file cannot be written: %s", "the heartbeat file is written again"
        self._outage = Outage(logger, failing, recovered, level=logging.WARNING)
        self._thread = Periodic("petiole-heartbeat", self._try)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def beat(self) -> None:
        at = time.time() - self._age_s()
        self._path.touch()
        os.utime(self._path, (at, at))
        beside = _beside(self._path)
        beside.touch() if self._ready() else beside.unlink(missing_ok=True)

    def _try(self) -> float:
        try:
            self.beat()
            self._outage.ended()
        except OSError as error:
            self._outage.began(error)
        return BEAT_S


def clear(path: Path) -> None:
    """Remove the files of an earlier worker. Raises OSError if they could not be written."""
    for one in (path, _beside(path)):
        one.touch()
        one.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + READY)
