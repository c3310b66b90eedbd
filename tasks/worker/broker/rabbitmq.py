"""kombu's RabbitMQ transport, with messages that pass the gate.

RabbitMQ hands on what a publisher has sent, and py-amqp decodes it on the connection of all consumers. So a
header, a routing key or a body that cannot be decoded would end the worker, come back, and end the next one. Here
each of them is a fault of its message:

    properties that cannot be read      the message has none, and says why: the consumer has it put aside
    names that are not UTF-8            their other bytes are read as replacement characters
    a body's encoding                   the gate decodes bodies; py-amqp would use any codec of Python's
    an error of a consumer              is logged, and the message is dropped; Petiole's consumer of tasks has none
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import redis
from amqp import basic_message, method_framing, serialization, spec
from kombu import transport as transports
from kombu.transport import pyamqp

from petiole.tasks.worker.broker.gate.bodies import RabbitMessage, named

logger = logging.getLogger(__name__)

_amqp: Any = basic_message  # py-amqp is not typed, kombu only partly
_stock: Any = pyamqp

DELIVERY = "sLbss"
"""The arguments of a delivery, in py-amqp's notation: consumer tag, delivery tag, redelivered, exchange, routing
key."""
_ARGUMENTS_AT = 4  # after the ids of class and method


class CheckedMessage(_amqp.Message):  # type: ignore[misc]
    """A received message whose properties may be unreadable."""

    properties: dict[str, Any]
    unreadable: str | None = None

    def _load_properties(self, class_id: int, buf: Any, offset: int) -> Any:
        try:
            return super()._load_properties(class_id, buf, offset)
        except Exception as error:
            self.properties = {}
            self.unreadable = f"headers cannot be read: {named(error)}"
            return len(buf)


def readable(arguments: bytes) -> bytes:
    """The arguments of a delivery, with names that UTF-8 can decode."""
    try:
        serialization.loads(DELIVERY, arguments, _ARGUMENTS_AT)
        return arguments
    except UnicodeDecodeError:
        head, rest = _split(arguments, _ARGUMENTS_AT)
        fixed, names = rest[:9], rest[9:]  # the delivery tag and a flag
        exchange, names = _split(names, 0)
        routing_key, _ = _split(names, 0)
        return head + fixed + _mended(exchange) + _mended(routing_key)


def _split(data: bytes, at: int) -> tuple[bytes, bytes]:
    """`data` up to the end of the short string at `at`, and the rest."""
    end = at + 1 + data[at]
    return bytes(data[:end]), bytes(data[end:])


def _mended(name: bytes) -> bytes:
    text = name[1:].decode(errors="replace").encode()[:255].decode(errors="ignore").encode()
    return bytes([len(text)]) + text


class Channel(_stock.Channel):  # type: ignore[misc]
    Message = RabbitMessage

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "auto_decode": False})

    def dispatch_method(self, method_sig: Any, payload: Any, content: Any) -> Any:
        if method_sig == spec.Basic.Deliver:
            payload = readable(payload)
        return super().dispatch_method(method_sig, payload, content)

    def basic_consume(
        self, queue: str = "", *args: Any, no_ack: bool = False, callback: Callable[[Any], object], **options: Any
    ) -> Any:
        errors = (*self.connection.connection_errors, *self.connection.channel_errors, redis.RedisError)

        def guarded(content: Any) -> None:
            content.queue = queue
            try:
                callback(content)
            except errors:
                raise
            except Exception:
                logger.exception("a message of the exchange %r is dropped", content.delivery_info["exchange"])
                if not no_ack:
                    self.basic_reject(content.delivery_tag, requeue=False)

        return super().basic_consume(queue, *args, no_ack=no_ack, callback=guarded, **options)


class Connection(_stock.Connection):  # type: ignore[misc]
    Channel = Channel


class Transport(_stock.Transport):  # type: ignore[misc]
    Connection = Connection


class SSLTransport(_stock.SSLTransport):  # type: ignore[misc]
    Connection = Connection


def install() -> None:
    """Make kombu use this transport for RabbitMQ's URLs in this process."""
    framing: Any = method_framing
    framing.Message = CheckedMessage
    for alias, kind in (("amqp", Transport), ("pyamqp", Transport), ("amqps", SSLTransport)):
        transports.TRANSPORT_ALIASES[alias] = f"{__name__}:{kind.__name__}"
    transports._transport_cache.clear()
