"""Control commands that take one of the broker's pooled connections, not two.

To broadcast a command (`revoke`, and so `tasks.cancel`), Celery takes a connection of the pool, and then a second
one to publish. If ten callers, as many as the pool has connections, broadcast at once, they wait for each other
for ever, and so does each later `delay()`. It is enough that ten clients of a web app disconnect together."""

from __future__ import annotations

from typing import Any

from celery.app import control as stock
from kombu import pidbox


class BroadcastMailbox(pidbox.Mailbox):
    def __call__(self, connection: Any) -> Any:
        """A mailbox for one broadcast, which publishes on `connection`."""
        bound: Any = super().__call__(connection)  # type: ignore[no-untyped-call]
        bound.producer_pool = None
        return bound


class Control(stock.Control):  # type: ignore[misc]
    Mailbox = BroadcastMailbox
