"""Memory that was freed goes back to the system. glibc keeps what many small values took, for each thread apart:
a single text of a megabyte that was parsed leaves a process 30 to 60 MiB larger, and the next one on another
thread as much again. Behind each such text a process calls `release`. That gives back the end of the heap only for
what all threads share. So a process whose work is such texts calls `share_one_heap` before it has threads."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from functools import cache
from typing import Any

LARGE_BYTES = 256 * 2**10
"""JSON text of so many bytes may become tens of megabytes of values, and takes milliseconds to read."""

DELAY_S = 1.0
"""By then most of what was large is freed. And so the memory is looked through once a second at most."""

logger = logging.getLogger(__name__)

_waiting = threading.Lock()


_M_ARENA_MAX = -8
"""A parameter of glibc's `mallopt`."""


@cache
def _trim() -> Any:
    """glibc's function; None with another library of C."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def share_one_heap() -> None:
    """Let all threads that begin from now on take memory from one heap. Python's threads seldom wait for it: they
    take turns anyway."""
    if _trim() is not None:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def release() -> None:
    """Give back within `DELAY_S` what is free then. Any thread may call this, and nobody waits."""
    if _trim() is not None and _waiting.acquire(blocking=False):
        timer = threading.Timer(DELAY_S, _release)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # no thread can be had: the next one tries again
            _waiting.release()
            _say(str(error))


def _release() -> None:
    _waiting.release()
    _trim()(0)


@cache
def _say(why: str) -> None:
    """Once."""
    logger.warning("memory that was freed is not given back for now: %s", why)


def _after_fork() -> None:
    global _waiting
    _waiting = threading.Lock()  # the parent's timer does not run here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
