"""A minimal thread pool without results.

It is cheaper than `ThreadPoolExecutor`. The executor's `submit` creates a future, with a lock and a condition,
which nobody needs here. It also acquires a semaphore that every idle worker uses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Work = Callable[[], object]


class ThreadPool:
    """Calls queued functions in FIFO order on `number` threads. Exceptions are logged."""

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
        """Queue a function. Returns False if the pool is closed; the function is then not called."""
        with self._lock:
            if not self._closed:
                self._queue.put(work)
            return not self._closed

    def close(self) -> None:
        """Stop accepting work. Returns when all queued functions have been called."""
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
            except BaseException:  # a panic of native code is not an Exception
                logger.exception("%s raised", work)
            del work  # do not keep its objects until the next call
