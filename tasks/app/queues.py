"""How Celery declares this app's queues, and how it sends tasks to them with an eta.

On Redis, queues that producers name are listed in one place. On RabbitMQ, tasks behave as on Redis: the queues are
quorum queues. A consumer of a quorum queue never holds more messages than its first prefetch count.
That many tasks with an eta would block a worker. So tasks with an eta wait in RabbitMQ, by Celery's native delayed
delivery, which needs exchanges of the type topic."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import kombu
from amqp.exceptions import NotFound
from celery.app import amqp
from celery.utils.time import maybe_iso8601, maybe_make_aware

QUEUE_TYPE = "quorum"
EXCHANGE_TYPE = "topic"

_kombu: Any = kombu  # kombu is only partly typed


class ForeignQueue(_kombu.Queue):  # type: ignore[misc]
    """A queue that may be another app's, of a type that this app does not know. RabbitMQ refuses to declare an
    existing queue with another type, so this queue is declared only if it is missing."""

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        connection: Any = (channel or self.channel).connection
        with connection.channel() as looking:  # the error closes its channel
            try:
                looking.queue_declare(queue=self.name, passive=True)
            except NotFound:
                return super().declare(nowait, channel)
        return self.name


class ListedQueue(_kombu.Queue):  # type: ignore[misc]
    """A queue of Celery's defaults that is also bound to the exchange `listed_in`."""

    attrs = (*_kombu.Queue.attrs, ("listed_in", str))

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        name = super().declare(nowait, channel)
        _kombu.Exchange(self.listed_in)(channel or self.channel).declare(nowait=nowait)
        self.bind_to(self.listed_in, self.name, nowait=nowait, channel=channel)
        return name


class Queues(amqp.Queues):  # type: ignore[misc]
    """The queues of this app. On Redis all are bound to the default queue's exchange, too, so whoever counts
    messages finds each queue that a producer has named. On RabbitMQ, a queue whose name begins with the default
    queue's, such as `petiole.large`, is declared like the default queue. Any other queue is declared with Celery's
    defaults, if it is missing."""

    def new_missing(self, name: str) -> Any:
        default = self.default_exchange
        missing = super().new_missing(name)
        if default.type != EXCHANGE_TYPE:
            return ListedQueue(
                name, missing.exchange, name, queue_arguments=missing.queue_arguments, listed_in=default.name
            )
        if name.startswith(f"{default.name}."):
            exchange = _kombu.Exchange(name, EXCHANGE_TYPE)
            return _kombu.Queue(name, exchange, name, queue_arguments={"x-queue-type": QUEUE_TYPE})
        return ForeignQueue(name, missing.exchange, name, queue_arguments=missing.queue_arguments)


def whole_second(
    countdown: float | None, eta: datetime | str | None, now: datetime
) -> tuple[float | None, datetime | str | None]:
    """`countdown` and `eta`, with at least a second to wait: native delayed delivery counts whole seconds, and
    raises ValueError for zero."""
    at = maybe_iso8601(eta)
    wait_s = (maybe_make_aware(at) - maybe_make_aware(now)).total_seconds() if at else countdown or 0
    return (1, None) if 0 < wait_s < 1 else (countdown, eta)
