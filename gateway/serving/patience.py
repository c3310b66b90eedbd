"""Waits for a Redis that is away for a moment, such as during a failover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis

from petiole.gateway.core.failures import unavailable
from petiole.tasks.servers import connections

WAIT_S = 4.0
_PAUSE_S = 0.1

T = TypeVar("T")


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What the call returns. It may be made again, so it must change nothing at a second time. Raises `Failure` if
    Redis stays away, or has no memory left."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        try:
            return await call()
        except (*connections.LOST, redis.exceptions.ReadOnlyError, redis.exceptions.BusyLoadingError):
            if time.monotonic() + _PAUSE_S > give_up_at:
                raise unavailable("Redis cannot be reached at the moment; try again") from None
        except redis.exceptions.OutOfMemoryError:
            raise unavailable("Redis has reached its maxmemory; try again") from None
        await asyncio.sleep(_PAUSE_S)
