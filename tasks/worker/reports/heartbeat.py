"""The heartbeat file: its modification time says when the engine last made progress.

A supervisor's probe on the same machine reads it. It depends on nothing else, above all not on Redis: a probe that
asks over the broker would restart all workers of a fleet while Redis is away. The file is missing until the model
is loaded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""How often the file is written."""


class Heartbeat:
    """The thread that writes the file, from `start` until the process ends. `age_s` is the engine's."""

    def __init__(self, path: Path, age_s: Callable[[], float]) -> None:
        self._path, self._age_s = path, age_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petiole-heartbeat", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2.0)

    def beat(self) -> None:
        at = time.time() - self._age_s()
        self._path.touch()
        os.utime(self._path, (at, at))

    def _run(self) -> None:
        failing = False
        while not self._stopped.wait(BEAT_S):
            try:
                self.beat()
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("the heartbeat file cannot be written: %s", error)
                failing = True


def clear(path: Path) -> None:
    """Remove the file of an earlier worker. Raises OSError if the file could not be written."""
    path.touch()
    path.unlink()
