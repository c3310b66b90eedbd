"""Keys of the broker that somebody else has written into: they are named in the log, and all others go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

REPORTED_EVERY_S = 60.0

Quarantine = Callable[[bytes, str, str], None]

quarantine: Quarantine | None = None
"""Called with what cannot be parsed, the name of its queue or key, and the reason."""

_reported_at: dict[str, float] = {}


def report(key: str | bytes, expected: str) -> None:
    """Log that a key is not what it must be: at once, and again every minute while it lasts."""
    name, now = text(key), time.monotonic()
    if now - _reported_at.get(name, -REPORTED_EVERY_S) >= REPORTED_EVERY_S:
        _reported_at[name] = now
        logger.error("key %s is damaged: it must be %s", name, expected)


def put_aside(item: bytes, key: str | bytes, reason: str) -> None:
    """Quarantine what is no message."""
    logger.error("%s: a malformed message was put aside: %s", text(key), reason)
    if quarantine is not None:
        quarantine(item, text(key), reason)


def text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode(errors="replace")
