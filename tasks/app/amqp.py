"""How Celery makes the messages of this app."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from celery.app import amqp as stock

from petiole.tasks.app.queues import Queues
from petiole.tasks.traces import carried


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
