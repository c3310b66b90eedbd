"""What a worker sees of the machine that it runs on: its memory, and its clock beside Redis's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from petiole.gpu_worker.runtime.memory.container import memory_left
from petiole.tasks.servers.connections import LOST

logger = logging.getLogger(__name__)

SCARCE = 0.05
"""Below this share of the container's memory, a worker says that it may be killed."""

CLOCK_S = 5.0
"""A clock that differs from Redis's by more than this is named."""

_STATM = Path("/proc/self/statm")


class ProcessMemory:
    """This process's memory, for its reports. `left`: gives the bytes left in the container; None without a
    limit."""

    def __init__(self, left: Callable[[], int | None] = memory_left) -> None:
        self._left = left
        self._told = False

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`. Logs a warning once when the memory becomes scarce."""
        used, left = resident_bytes(), self._left()
        if left is not None:
            scarce = left < SCARCE * (used + left)
            if scarce and not self._told:
                logger.warning(
                    "memory: %d MiB are in use, and %d MiB are left below the container's limit, at which the "
                    "kernel kills the worker",
                    used >> 20,
                    left >> 20,
                )
            self._told = scarce
        return {"memory_bytes": used, "memory_left_bytes": left}


def resident_bytes() -> int:
    """The memory that this process has in use; 0 where the system does not say."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def clock_ahead_s(client: redis.Redis) -> float | None:
    """How far this machine's clock is ahead of Redis's; None if Redis does not answer."""
    before = time.time()
    try:
        seconds, microseconds = client.time()
    except (*LOST, redis.RedisError):
        return None
    return (before + time.time()) / 2 - (seconds + microseconds / 1e6)


def say_if_clocks_differ(client: redis.Redis) -> None:
    """Log a warning about a clock by which tasks would expire, or begin by their `eta`, at another time."""
    ahead_s = clock_ahead_s(client)
    if ahead_s is not None and abs(ahead_s) > CLOCK_S:
        logger.warning(
            "this machine's clock is %.0f s %s that of Redis: for this worker tasks expire, and begin by their "
            "`eta`, that much too %s",
            abs(ahead_s),
            *(("ahead of", "early") if ahead_s > 0 else ("behind", "late")),
        )
