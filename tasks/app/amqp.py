"""How Celery declares this app's queues and makes the messages that go there.

On Redis, queues that producers name are listed in one place. On RabbitMQ, tasks behave as on Redis: the queues are
quorum queues. A consumer of a quorum queue never holds more messages than its first prefetch count.
That many tasks with an eta would block a worker. So tasks with an eta wait in RabbitMQ, by Celery's native delayed
delivery, which needs exchanges of the type topic."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any

import kombu
from amqp.exceptions import NotFound
from celery.app import amqp as stock
from celery.utils.time import maybe_iso8601, maybe_make_aware

from petiole.tasks.traces import carried

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


class Queues(stock.Queues):  # type: ignore[misc]
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


class Amqp(stock.AMQP):  # type: ignore[misc]
    """Celery's class, but a message with `expires` has no time to live: RabbitMQ would drop an expired message
    silently. Here a worker takes the message and revokes the task, so the caller and the readers are told. And a
    message is in the trace of whoever submits it."""

    queues_cls = Queues

    @property
    def producer_pool(self) -> Any:
        return self.app.pools.producers

    publisher_pool = producer_pool  # Celery's other name

    @cached_property
    def send_task_message(self) -> Callable[..., Any]:
        send = self._create_task_sender()

        def send_without(producer: Any, name: str, message: Any, expiration: Any = None, **options: Any) -> Any:
            if trace := carried.headers():
                options["headers"] = {**trace, **(options.get("headers") or {})}
            return send(producer, name, message, **options)

        return send_without

    def as_task_v2(self, task_id: Any, name: str, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        """Celery's, but short arguments are shown without a walk through them, which takes 8 % of the time of a
        submission."""
        for which, given in (("argsrepr", args), ("kwargsrepr", kwargs)):
            if (text := shown(given)) is not None:
                options.setdefault(which, text)
        return super().as_task_v2(task_id, name, args, kwargs, *more, **options)


def shown(given: Any) -> str | None:
    """`given` as Celery shows it, if it is small and simple."""
    if not isinstance(given, dict | tuple) or len(given) > 8:
        return None
    if not all(map(_is_short, given.values() if isinstance(given, dict) else given)):
        return None
    text = repr(given)
    return text if len(text) < 1000 and '"' not in text and "\\" not in text else None


def _is_short(value: Any) -> bool:
    if type(value) is list:  # of token ids
        return len(value) < 200 and {*map(type, value)} <= {int}
    return len(value) < 500 if type(value) is str else value is None or type(value) in {int, float, bool}
