"""Control commands that take one of the broker's pooled connections, not two.

Celery broadcasts a command (`revoke`, and so `tasks.cancel`) with a connection of the pool in hand, and takes a
second one to publish. As many callers at once as the pool has connections, ten, wait for each other for ever, and
so does each `delay()` after them: it is enough that as many clients of a web app disconnect together.
"""

from __future__ import annotations

from typing import Any

from celery.app import control as stock
from kombu import pidbox


class Mailbox(pidbox.Mailbox):
    def __call__(self, connection: Any) -> Any:
        """The mailbox for one broadcast, which publishes on `connection`."""
        bound: Any = super().__call__(connection)  # type: ignore[no-untyped-call]
        bound.producer_pool = None
        return bound


class Control(stock.Control):  # type: ignore[misc]
    Mailbox = Mailbox
