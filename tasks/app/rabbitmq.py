"""What Celery's way of sending tasks needs so that RabbitMQ's queues behave as Redis's do.

The queues are quorum queues. A consumer of such a queue never holds more than its first prefetch count, so as many
tasks with an eta would block a worker. So these wait in RabbitMQ, by Celery's native delayed delivery, which needs
exchanges of the type topic.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any

import kombu
from celery.app import amqp
from celery.utils.time import maybe_iso8601, maybe_make_aware

QUEUE_TYPE = "quorum"
EXCHANGE_TYPE = "topic"

_kombu: Any = kombu  # it is only partly typed


class Queues(amqp.Queues):  # type: ignore[misc]
    """A queue that is named after the default one, such as `petiole.large`, is declared like it; any other, which
    may be another app's, with Celery's defaults. RabbitMQ refuses to declare what exists in another way."""

    def new_missing(self, name: str) -> Any:
        default = self.default_exchange
        if default.type == EXCHANGE_TYPE and name.startswith(f"{default.name}."):
            exchange = _kombu.Exchange(name, EXCHANGE_TYPE)
            return _kombu.Queue(name, exchange, name, queue_arguments={"x-queue-type": QUEUE_TYPE})
        return super().new_missing(name)


class Amqp(amqp.AMQP):  # type: ignore[misc]
    """Celery's, without the time to live of a message with `expires`: RabbitMQ would drop it in silence. A worker
    that takes it revokes the task, so its caller and the readers of its stream are told."""

    queues_cls = Queues

    @cached_property
    def send_task_message(self) -> Callable[..., Any]:
        send = self._create_task_sender()
        return lambda *args, expiration=None, **options: send(*args, **options)


def whole_second(
    countdown: float | None, eta: datetime | str | None, now: datetime
) -> tuple[float | None, datetime | str | None]:
    """`countdown` and `eta`, with a wait of less than a second made one: native delayed delivery counts whole
    seconds, and raises ValueError for none."""
    at = maybe_iso8601(eta)
    wait_s = (maybe_make_aware(at) - maybe_make_aware(now)).total_seconds() if at else countdown or 0
    return (1, None) if 0 < wait_s < 1 else (countdown, eta)
