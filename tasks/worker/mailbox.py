"""Letters to the consumer's thread.

Celery's request objects and its sets of active requests belong to that thread; the engine, the publisher and the
completion threads post here what concerns them. A pipe in the event loop's poller wakes it up: a callback that is
run as a reader may itself call `call_soon`, which the loop then runs before it polls again, while one nested in
another `call_soon` would wait for the next poll.
"""

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

Letter = Callable[[], object]


class Mailbox:
    """Posted to by any thread, read by the one that runs the event loop."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._posted = threading.Event()

    def post(self, letter: Letter) -> None:
        self._letters.append(letter)
        if not self._posted.is_set():
            self._posted.set()
            with suppress(OSError):  # full: the reader wakes up anyway; closed: nobody reads
                os.write(self._writer, b"\0")

    def attach(self, loop: Any) -> None:
        """Have `loop` (kombu's hub) read the letters. Needed anew after each lost connection."""
        loop.add_reader(self._reader, self.read)

    def read(self) -> None:
        """Run what has been posted. What raises is logged: nothing that a task does may end the worker."""
        with suppress(OSError):
            os.read(self._reader, 4096)
        self._posted.clear()
        while self._letters:
            letter = self._letters.popleft()
            try:
                letter()
            except Exception:
                logger.exception("a callback of the pool raised")

    def wait(self, until: Callable[[], bool], timeout_s: float, between: Letter) -> bool:
        """Without an event loop: read letters, and call `between`, until `until()` or the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            between()
            if until():
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._posted.wait(min(left, 0.1))

    def close(self) -> None:
        for fd in (self._reader, self._writer):
            with suppress(OSError):
                os.close(fd)
