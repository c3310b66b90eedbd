"""Celery's consumer behind the gate.

A stock worker exits on a header of the wrong type, and the redelivered message then ends the next worker. It
acknowledges other bad messages without a result. This consumer gives Celery only messages that the gate lets
through, and has the others put aside. Errors of Redis or the result backend are raised as usual."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import redis
from amqp.exceptions import ChannelError, IrrecoverableConnectionError
from celery import signals
from celery.exceptions import CPendingDeprecationWarning, NotRegistered
from celery.worker.consumer import Consumer as StockConsumer, tasks as consuming
from celery.worker.consumer.control import Control
from celery.worker.consumer.gossip import Gossip
from celery.worker.consumer.mingle import Mingle
from celery.worker.loops import asynloop, synloop
from celery.worker.state import maybe_shutdown
from kombu.common import QoS

from petiole.tasks.wire.keys import is_beside
from petiole.tasks.worker.broker import gate, quarantine
from petiole.tasks.worker.broker.transport import lost_errors
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

CONNECTING_PAUSES_S = (1, 1, 5)
"""Pause before the second attempt to connect, its increment at each further attempt, and its maximum."""


class Consumer(StockConsumer):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for step in self.steps:
            guard(step)

    def ensure_connected(self, conn: Any) -> Any:
        """Connect to the broker; retry without limit by default, and log each failed attempt."""
        conf = self.app.conf
        if not (conf.broker_connection_retry and conf.broker_connection_retry_on_startup):
            return super().ensure_connected(conn)

        def report(error: Exception, pause_s: float) -> None:
            reason = str(error).rstrip(".")
            logger.error("no connection to %s: %s; trying again in %.0f s", conn.as_uri(), reason, pause_s)

        most = conf.broker_connection_max_retries
        connected = conn.ensure_connection(report, most, *CONNECTING_PAUSES_S, callback=maybe_shutdown)
        self.first_connection_attempt = False
        return connected

    def loop(self, *arguments: Any) -> None:
        """Celery's event loop. If RabbitMQ closes a channel, as it does when a message is held for longer than its
        `consumer_timeout`, the worker connects again, and the held messages come back."""
        try:
            (asynloop if self.hub else synloop)(*arguments)
        except ChannelError as error:
            raise ConnectionResetError(f"the broker has closed a channel: {error}") from error

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        with warnings.catch_warnings():  # Celery's warning about a default that a later version changes
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)

    def add_task_queue(self, queue: Any, *args: Any, **options: Any) -> None:
        """Carry out the command `add_consumer`. A queue that cannot be consumed is forgotten, because it would be
        declared again with each new connection. Celery calls this where an error would end the worker."""
        queues = self.app.amqp.queues
        known = queue in queues
        try:
            super().add_task_queue(queue, *args, **options)
        except Exception as error:
            lost = isinstance(error, self.lost_errors)
            refused = not lost or isinstance(error, IrrecoverableConnectionError)
            if refused:
                logger.error("cannot consume from the queue %r: %s: %s", queue, type(error).__name__, error)
            if refused and not known:
                queues.deselect(queue)
                dict.pop(queues, queue, None)
            if lost or isinstance(error, self.channel_errors):  # the broker has closed connection or channel
                raise

    def cancel_task_queue(self, queue: Any) -> None:
        """Carry out the command `cancel_consumer`, also for the queue of the model beside this one."""
        try:
            for name in [queue, *(one for one in self.app.amqp.queues.consume_from if is_beside(one, str(queue)))]:
                super().cancel_task_queue(name)
            if not self.app.amqp.queues.consume_from and not self.pool.serving.steering.given_up:
                logger.warning("%s takes from no queue any longer, until `add_consumer` names one", self.hostname)
        except (*self.lost_errors, *self.channel_errors):
            raise
        except Exception:
            logger.exception("cannot stop to consume from the queue %r", queue)

    @cached_property
    def lost_errors(self) -> tuple[type[Exception], ...]:
        return lost_errors(self.connection_errors)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)

        def guarded(message: Any) -> None:
            if isinstance(where := message.delivery_info, dict) and where.get("redelivered"):
                incidents.count("redeliveries")
            task = gate.task(message)
            if isinstance(task, gate.RefusedMessage):
                self.refuse(message, task)
                return
            message.headers, message._decoded_cache = task.headers, task.body
            try:
                handle(message)
                self.make_room()
            except (redis.RedisError, OSError):
                raise
            except Exception as error:
                logger.exception("a message could not be handled")
                self.refuse(message, gate.unhandled(task, error))

        return guarded

    def make_room(self) -> None:
        """Make the event loop turn at once. A task with an eta raises the prefetch, and Celery applies the new
        prefetch in the next turn, which may be a second away."""
        if self.qos.value != self.qos.prev:
            self.pool.mailbox.post(lambda: None)

    def refuse(self, message: Any, refused: gate.RefusedMessage, error: Exception | None = None) -> None:
        """Have the message put aside, and then acknowledged. Stock Celery acknowledges it without a result."""

        def acknowledge() -> None:
            if not message.acknowledged:
                message.ack_log_error(logger, self.connection_errors)

        quarantine.refuse(message, message.queue, refused, error, acknowledge)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Called by kombu for a message that it cannot decompress, and for a control command that it cannot
        decode."""
        if message.channel is not getattr(self.task_consumer, "channel", None):
            logger.error("a control command was refused: %s: %s", type(exc).__name__, exc)
            return
        self.refuse(message, gate.undecodable(message, exc))

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self.refuse(message, gate.RefusedMessage("the message names no task"))

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        reason = f"no valid task: {type(exc).__name__}: {exc}"
        self.refuse(message, gate.RefusedMessage(reason, gate.task(message).task_id))

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Have the message put aside. Stock Celery stores the failure here, on the event loop's thread."""
        task = gate.task(message)
        if isinstance(task, gate.RefusedMessage):
            self.refuse(message, task)
            return
        name = task.name
        reason = f"headers.task must be a task that this worker has, got {name}"
        self.refuse(message, gate.RefusedMessage(reason, task.task_id), NotRegistered(name))
        if self.event_dispatcher:
            self.event_dispatcher.send("task-failed", uuid=task.task_id, exception=f"NotRegistered({name!r})")
        signals.task_unknown.send(sender=self, message=message, exc=exc, name=name, id=task.task_id)


# ---------------------------------------------------------------- what is no task

MOST_ELECTIONS = 100
"""Maximum number of elections that wait for their end. Celery forgets none by itself."""


def guard(step: Any) -> None:
    """Have a bootstep of Celery's consumer handle only what passes the gate."""
    if isinstance(step, Control):
        _guard_commands(step.box)
    elif isinstance(step, Gossip):
        _guard_events(step)
    elif isinstance(step, Mingle):
        _guard_replies(step)


def _guard_commands(box: Any) -> None:
    handle_message, handle = box.on_message, box.node.handle

    def on_message(body: Any, message: Any) -> None:
        if refused := gate.broadcasts.control(message):
            logger.error("a control command was refused: %s", refused.reason)
        else:
            handle_message(message.payload, message)

    def checked(method: str, arguments: dict[str, Any] | None = None) -> Any:
        try:
            gate.broadcasts.arguments(method, arguments or {})
        except gate.RefusedError as refused:
            logger.error("a control command was refused: %s", str(refused))
            return {"error": repr(refused)}
        return handle(method, arguments)

    box.on_message, box.node.handle = on_message, checked


def _guard_events(gossip: Any) -> None:
    handle_message, get_consumers = gossip.on_message, gossip.get_consumers

    def on_message(prepare: Any, message: Any) -> None:
        if not gate.broadcasts.is_of_a_worker(message):
            return
        if refused := gate.broadcasts.event(message):
            logger.error("an event was refused: %s", refused.reason)
            return
        handle_message(prepare, message)
        if len(gossip.consensus_requests) > MOST_ELECTIONS:
            gossip.consensus_requests.clear()

    def consumers(channel: Any) -> Any:
        found = get_consumers(channel)
        for consumer in found:
            consumer.on_decode_error = _refuse_event
        return found

    gossip.on_message, gossip.get_consumers = on_message, consumers


def _refuse_event(message: Any, exc: Exception) -> None:
    logger.error("an event was refused: %s: %s", type(exc).__name__, exc)


def _guard_replies(mingle: Any) -> None:
    send_hello = mingle.send_hello

    def checked(consumer: Any) -> Any:
        try:
            return gate.broadcasts.hello(send_hello(consumer))
        except (*consumer.lost_errors, *consumer.channel_errors):
            raise
        except Exception:
            logger.exception("the replies of other workers could not be read")
            return {}

    mingle.send_hello = checked


class Prefetch(QoS):
    """The prefetch count of a worker that holds tasks with an `eta`.

    Each such task raises the prefetch by one until it begins, up to a limit. kombu ignores an increment beyond the
    limit, but still applies the matching decrement. So after exceeding the limit, a stock worker would be left
    with a prefetch of one for good. `beyond`: increments refused by the limit whose decrements must be ignored."""

    beyond = 0

    def increment_eventually(self, n: int = 1) -> int:
        with self._mutex:
            if self.value:
                room = n if self.max_prefetch is None else min(n, max(0, self.max_prefetch - self.value))
                if room < n and not self.beyond:
                    logger.warning(
                        "no more tasks are taken until some of those held for their eta begin: "
                        "worker_eta_task_limit is %d",
                        self.max_prefetch,
                    )
                self.beyond += n - room
                self.value += room
            return int(self.value)

    def decrement_eventually(self, n: int = 1) -> int:
        with self._mutex:
            forgiven = min(n, self.beyond)
            self.beyond -= forgiven
            return int(super().decrement_eventually(n - forgiven))  # type: ignore[no-untyped-call]


def install() -> None:
    """Make all consumers of this process use `Prefetch`."""
    consuming.QoS = Prefetch
