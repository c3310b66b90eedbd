"""A thread that repeats one function until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

JOIN_S = 2.0
"""How long `stop` waits for the work at hand, unless it is told otherwise."""


class Periodic:
    """Calls `work` on a daemon thread of its own, for the first time at once. Each call returns the seconds until
    the next call. An exception ends the thread, so `work` handles the exceptions that it expects."""

    def __init__(self, name: str, work: Callable[[], float]) -> None:
        self._work = work
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_s: float = JOIN_S) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    @property
    def stopped(self) -> bool:
        """Whether a call of `work` that is running should return."""
        return self._stopped.is_set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            pause_s = self._work()
