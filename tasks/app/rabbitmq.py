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
from amqp.exceptions import NotFound
from celery.app import amqp
from celery.utils.time import maybe_iso8601, maybe_make_aware

QUEUE_TYPE = "quorum"
EXCHANGE_TYPE = "topic"

_kombu: Any = kombu  # it is only partly typed


class OthersQueue(_kombu.Queue):  # type: ignore[misc]
    """A queue that may be another app's, whose type nobody here knows. RabbitMQ refuses to declare what exists in
    another way, so it is declared only where it is missing."""

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        connection: Any = (channel or self.channel).connection
        with connection.channel() as looking:  # the error closes its channel
            try:
                looking.queue_declare(queue=self.name, passive=True)
            except NotFound:
                return super().declare(nowait, channel)
        return self.name


class Queues(amqp.Queues):  # type: ignore[misc]
    """On RabbitMQ a queue that is named after the default one, such as `petiole.large`, is declared like it; any
    other, where it is missing, with Celery's defaults."""

    def new_missing(self, name: str) -> Any:
        default = self.default_exchange
        missing = super().new_missing(name)
        if default.type != EXCHANGE_TYPE:
            return missing
        if name.startswith(f"{default.name}."):
            exchange = _kombu.Exchange(name, EXCHANGE_TYPE)
            return _kombu.Queue(name, exchange, name, queue_arguments={"x-queue-type": QUEUE_TYPE})
        return OthersQueue(name, missing.exchange, name, queue_arguments=missing.queue_arguments)


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
