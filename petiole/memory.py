"""Memory that was freed goes back to the system. glibc keeps what many small values took, for each thread apart:
a single text of a megabyte that was parsed leaves a process 30 to 60 MiB larger, and the next one on another
thread as much again. Behind each such text a process calls `release`."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

LARGE_BYTES = 256 * 2**10
"""JSON text of so many bytes may become tens of megabytes of values, and takes milliseconds to read."""

DELAY_S = 1.0
"""By then most of what was large is freed. And so the memory is looked through once a second at most."""

_waiting = threading.Lock()


@cache
def _trim() -> Any:
    """glibc's function; None with another library of C."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def release() -> None:
    """Give back within `DELAY_S` what is free then. Any thread may call this, and nobody waits."""
    if _trim() is not None and _waiting.acquire(blocking=False):
        timer = threading.Timer(DELAY_S, _release)
        timer.daemon = True
        timer.start()


def _release() -> None:
    _waiting.release()
    _trim()(0)
