"""Keys of the broker that somebody else has written into. The log names them, and the worker goes on with all
others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

REPORTED_EVERY_S = 60.0

Quarantine = Callable[[bytes, str, str], None]

quarantine: Quarantine | None = None
"""Called with an unreadable message, the name of its queue or key, and the reason."""

_REMEMBERED = 1000
_reported_at: dict[str, float] = {}  # the last `_REMEMBERED` keys, the most recent one at the end
_lock = threading.Lock()


def report(key: str | bytes, expected: str) -> None:
    """Log a key of the wrong type: at once, and every minute while the key stays wrong."""
    if _is_due(text(key), time.monotonic()):
        logger.error("key %s is damaged: it must be %s", text(key), expected)


def _is_due(name: str, now: float) -> bool:
    with _lock:
        if name in _reported_at and now - _reported_at[name] < REPORTED_EVERY_S:
            return False
        _reported_at.pop(name, None)
        _reported_at[name] = now
        while len(_reported_at) > _REMEMBERED:
            del _reported_at[next(iter(_reported_at))]
        return True


def put_aside(item: bytes, key: str | bytes, reason: str) -> None:
    """Quarantine an entry that is not a message."""
    if quarantine is not None:
        quarantine(item, text(key), reason)


def text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode(errors="replace")
