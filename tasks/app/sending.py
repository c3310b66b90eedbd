"""How Celery makes and sends the messages of this app; those of several callers go to Redis in one round trip.

`Together` stands in for a producer of kombu's while the tasks of these callers are submitted, and keeps the
messages that Celery makes. `send` does for them what Celery does around a producer's `publish`, in stages:
Celery's signal before, the message as kombu writes it, one round trip for all, Celery's signal after. A caller's
signals are sent in that caller's context.

Only plain messages are kept: those for a queue, with Celery's defaults. Celery sends all others itself."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import Celery, signals
from celery.app import amqp as stock
from celery.app.routes import Queue  # kombu's

from petiole import _lazy
from petiole.tasks.app import two_apps
from petiole.tasks.app.rabbitmq import Queues
from petiole.tasks.errors import Unconfirmed

if TYPE_CHECKING:
    from petiole.tasks.app import publishing
    from petiole.tasks.servers import answers
else:  # they import redis-py
    answers = _lazy.module("petiole.tasks.servers.answers")
    publishing = _lazy.module("petiole.tasks.app.publishing")

_NOT_PLAIN = "exchange", "routing_key", "exchange_type", "declare", "retry", "retry_policy", "event_dispatcher"
_FORM = {
    "serializer": "task_serializer",
    "compression": "task_compression",
    "delivery_mode": "task_default_delivery_mode",
}
"""Options of Celery's `send_task_message`, which makes properties of the message of all others."""


@dataclass(slots=True)
class KeptMessage:
    """`error`: why this message could not be sent, if the others could."""

    name: str
    body: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
    form: dict[str, Any]
    queue: Any
    declare: list[Any]
    policy: dict[str, Any]
    confirmation: publishing.Confirmation | None = field(default_factory=lambda: publishing.wanted())
    context: Context = field(default_factory=copy_context)
    sent: bool = False
    error: Exception | None = None

    def signal(self, signal: Any, **more: Any) -> None:
        place = {"exchange": "", "routing_key": self.queue.name}
        self.context.run(signal.send, sender=self.name, body=self.body, headers=self.headers, **place, **more)


class Together:
    """`kept`: the messages, in the order of their submission."""

    def __init__(self, app: Celery, producer: Any) -> None:
        self._producer = producer
        self._form = {one: app.conf[where] for one, where in _FORM.items()}
        self._policy, self._may_retry = dict(app.conf.task_publish_retry_policy), app.conf.task_publish_retry
        self.kept: list[KeptMessage] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def keep(self, name: str, message: Any, queue: Any = None, headers: Any = None, **options: Any) -> bool:
        """Keep the message, if it is plain. Returns whether it is."""
        own, properties, body, sent_event = message
        direct = isinstance(queue, Queue) and queue.exchange.type == "direct" and not queue.queue_arguments
        if sent_event or not direct or any(options.pop(one, None) is not None for one in _NOT_PLAIN):
            return False
        if signals.task_sent.receivers or not self._may_retry:  # Celery's older signal
            return False
        form = {one: options.pop(one, None) or self._form[one] for one in _FORM}
        form["delivery_mode"] = queue.exchange.delivery_mode or form["delivery_mode"]
        own.update(headers or {})
        properties.update(options)
        self.kept.append(KeptMessage(name, body, own, properties, form, queue, [queue], dict(self._policy)))
        return True

    def send(self) -> None:
        """Send what was kept. Raises `OperationalError` if the broker is away: what is then neither `sent` nor has
        an `error` was not sent."""
        with two_apps.sent_by_petiole():
            for message in self.kept:
                more = {name: getattr(message, name) for name in ("declare", "properties")}
                message.signal(signals.before_task_publish, retry_policy=message.policy, **more)
            try:
                for policy in [self._policy, *(one.policy for one in self.kept if one.policy != self._policy)]:
                    self._producer.connection.ensure(self._producer, self._write, **policy)(policy)
            finally:
                for message in self.kept:
                    if message.sent:
                        message.signal(signals.after_task_publish)

    def _write(self, policy: dict[str, Any]) -> None:
        """Write what is neither sent nor refused. kombu calls it again if the connection is lost."""
        rest = [one for one in self.kept if one.policy == policy and not (one.sent or one.error)]
        for confirmation in sorted({one.confirmation for one in rest}, key=bool):  # those that need not wait first
            self._push([one for one in rest if one.confirmation == confirmation], confirmation)

    def _push(self, messages: list[KeptMessage], confirmation: publishing.Confirmation | None) -> None:
        lost = self._producer.connection.recoverable_connection_errors
        channel, failure = self._producer.channel, None
        with channel.collecting() as pushes:
            for message in messages:
                try:
                    self._publish(message)
                except Exception as error:
                    if isinstance(error, lost) and not answers.is_damage(error):
                        raise
                    message.error = error
        collected = [message for message in messages if message.error is None]
        replies = channel.push(pushes, confirmation)
        for message, reply in zip(collected, replies, strict=True):
            if isinstance(reply, Unconfirmed) or answers.is_damage(reply):
                message.error = reply
            elif isinstance(reply, Exception):
                failure = reply
            else:
                message.sent = True
        if failure is not None:
            raise failure

    def _publish(self, message: KeptMessage) -> None:
        self._producer.publish(
            message.body,
            exchange="",
            routing_key=message.queue.name,
            declare=message.declare,
            headers=message.headers,
            **message.form,
            **message.properties,
        )


class Amqp(stock.AMQP):  # type: ignore[misc]
    """Celery's class, but a message with `expires` has no time to live: RabbitMQ would drop an expired message
    silently. Here a worker takes the message and revokes the task, so the caller and the readers are told."""

    queues_cls = Queues

    @property
    def producer_pool(self) -> Any:
        return self.app.pools.producers

    publisher_pool = producer_pool  # Celery's other name

    @cached_property
    def send_task_message(self) -> Callable[..., Any]:
        send = self._create_task_sender()

        def send_or_keep(producer: Any, name: str, message: Any, expiration: Any = None, **options: Any) -> Any:
            if isinstance(producer, Together) and producer.keep(name, message, **options):
                return None
            return send(producer, name, message, **options)

        return send_or_keep

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
