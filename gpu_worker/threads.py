"""A few threads that do one thing after another.

An executor's `submit` makes a future with a lock and a condition, for an answer that nobody here waits for, and
passes a semaphore that every idle worker passes, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Work = Callable[[], object]


class Threads:
    """Call what is put, in the order in which it was put, on `number` threads. What raises is logged."""

    def __init__(self, number: int, name: str) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True) for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, work: Work) -> bool:
        """False once they are closed: then it will not be called."""
        with self._lock:
            if not self._closed:
                self._queue.put(work)
            return not self._closed

    def close(self) -> None:
        """Return when everything that was put has been done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s raised", work)
