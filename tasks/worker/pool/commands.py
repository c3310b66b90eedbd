"""Control commands, such as `shutdown`: which of them a worker carries out, and where its answers go.

Whoever may publish on a control exchange commands all workers, and a command does not say who sent it. So only
the broker's rights can tell operators and producers apart, and they go by exchange. If
`PETIOLE_CONTROL_EXCHANGE` names an exchange for operators, a worker listens to two:

    exchange            for            commands
    the setting's       operators      all
    Celery's, `celery`  producers      `PRODUCERS`

An answer may show other callers' prompts (`inspect active`). The command says where it goes, so the worker checks
that: the queue must have a name that Celery makes for a caller's answers. The answer goes into this queue itself,
because on Redis a producer may write bindings."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection
from typing import Any

from celery.worker.consumer.control import Control
from kombu import pidbox
from kombu.utils.functional import lazy

from petiole.tasks.settings import STOCK_CONTROL_EXCHANGE, settings

_pidbox: Any = pidbox  # kombu is only partly typed
logger = logging.getLogger(__name__)

PRODUCERS = frozenset({"revoke", "ping"})
"""The commands of producers: cancelling a task, whose id one must know, and asking which workers are there."""

WARN_EVERY_S = 60.0

_CALLER = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Node(_pidbox.Node):  # type: ignore[misc]
    """A worker's end of a control exchange. `commands`: those that are carried out; None: all."""

    commands: Collection[str] | None = None
    _warned_at = float("-inf")

    def dispatch(
        self, method: Any, arguments: Any = None, reply_to: Any = None, ticket: Any = None, **more: Any
    ) -> Any:
        """Carry out a command, unless it is refused. A refused command gets no answer."""
        known = isinstance(method, str) and method in self.handlers
        if self.commands is not None and not (known and method in self.commands):
            named = method if known else "an unknown one"
            return self._refuse(f"only {', '.join(sorted(self.commands))} may be sent here, got {named}")
        if reply_to and not self.is_callers(reply_to):
            return self._refuse("reply_to must be a queue that Celery has made for its caller")
        return super().dispatch(method, arguments, reply_to, ticket, **more)

    def is_callers(self, reply_to: object) -> bool:
        """Whether answers may go there: Celery's exchange for answers, and a caller's random id."""
        return (
            isinstance(reply_to, dict)
            and reply_to.keys() == {"exchange", "routing_key"}
            and reply_to["exchange"] == self.mailbox.reply_exchange.name
            and isinstance(caller := reply_to["routing_key"], str)
            and _CALLER.fullmatch(caller) is not None
        )

    def reply(self, data: Any, exchange: str, routing_key: str, ticket: Any, **options: Any) -> None:
        """Send an answer into the caller's queue, without an exchange."""
        super().reply(data, "", f"{routing_key}.{exchange}", ticket, **options)

    def _refuse(self, why: str) -> None:
        """Log a refusal, one a minute at most: whoever sends such commands must not fill the log."""
        if (now := time.monotonic()) - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logger.warning("a control command on %s was refused: %s", self.mailbox.exchange.name, why)


class ProducersNode(Node):
    commands = PRODUCERS


class ProducersControl(Control):  # type: ignore[misc]
    """The bootstep that listens to Celery's exchange, for producers, beside that of operators."""

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        operators, app = self.box.node, consumer.app
        mailbox = app.control.Mailbox(
            STOCK_CONTROL_EXCHANGE,
            type="fanout",
            accept=app.conf.accept_content,
            serializer=app.conf.task_serializer,
            producer_pool=lazy(lambda: app.amqp.producer_pool),  # type: ignore[no-untyped-call]
            queue_ttl=app.conf.control_queue_ttl,
            queue_expires=app.conf.control_queue_expires,
            queue_exclusive=app.conf.control_queue_exclusive,
            queue_durable=app.conf.control_queue_durable,
        )
        mailbox.node_cls = ProducersNode
        self.box.node = mailbox.Node(operators.hostname, handlers=operators.handlers, state=operators.state)


def install(app: Any) -> None:
    """Have the worker of `app` listen to control commands in this way."""
    app.control.mailbox.node_cls = Node
    if settings().control_exchange != STOCK_CONTROL_EXCHANGE:
        app.steps["consumer"].add(ProducersControl)
