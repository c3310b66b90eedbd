"""A queue of callbacks for the consumer's thread.

Only that thread may change Celery's request objects and its sets of active requests. The engine, publisher and
completion threads post such changes here. A pipe wakes the event loop. The loop reads the mailbox in a reader
callback, not by `call_soon`. A callback that a reader schedules with `call_soon` runs before the next poll; a
`call_soon` inside another `call_soon` would wait for that poll."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

Callback = Callable[[], object]


class Mailbox:
    """Any thread may post; the thread of the event loop reads."""

    def __init__(self) -> None:
        self._callbacks: deque[Callback] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._posted = threading.Event()

    def post(self, callback: Callback) -> None:
        self._callbacks.append(callback)
        if not self._posted.is_set():
            self._posted.set()
            with suppress(OSError):  # full: the reader is awake already
                os.write(self._writer, b"\0")

    def attach(self, loop: Any) -> None:
        """Register with `loop` (kombu's hub). Must be repeated after each lost connection."""
        loop.add_reader(self._reader, self.read)

    def read(self) -> None:
        """Run the posted callbacks. Exceptions are logged, because no task may end the worker."""
        with suppress(OSError):
            os.read(self._reader, 4096)
        self._posted.clear()
        while self._callbacks:
            callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:
                logger.exception("a callback of the pool raised")

    def wait(self, until: Callable[[], bool], timeout_s: float, between: Callback) -> bool:
        """Without an event loop: read, and call `between`, until `until()` is true. Returns False after the
        timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            between()
            if until():
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._posted.wait(min(left, 0.1))
