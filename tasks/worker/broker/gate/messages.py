"""kombu's messages, which inflate and decode their bodies within the limits of `bodies`.

    Redis       Channel.Message of `transport`
    RabbitMQ    Channel.Message of `rabbitmq`

A refused message keeps nothing alive. kombu keeps the traceback of an error in the message, or in a frame of that
traceback. The traceback's frames keep the message, and all that was inflated: a circle, which stays until the
garbage collector runs. Here errors have no traceback of kombu's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.exceptions import DecodeError
from kombu.transport import pyamqp
from kombu.transport.virtual import base as virtual

from petiole.tasks.worker.broker.gate.bodies import RefusedError, check_depth, check_encoding, check_size

_pyamqp: Any = pyamqp  # kombu is only partly typed
_virtual: Any = virtual


class BrokerMessage:
    """`queue`: from which it was taken. What a producer says of that in the message need not be so."""

    queue: str = ""
    errors: Any
    body: Any
    content_encoding: Any
    _decoded_cache: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.errors = [(kind, error.with_traceback(None), None) for kind, error, _ in self.errors]

    def decode(self) -> Any:
        """The decoded body. Raises kombu's DecodeError."""
        if self._decoded_cache:
            return self._decoded_cache
        stock: Any = super()
        try:
            check_encoding(self.content_encoding)
            nested = check_size("body", self.body) if isinstance(self.body, bytes | str) else None
            decoded = stock.decode()
            check_depth("body", decoded, nested)
        except (RefusedError, RecursionError) as error:
            self._decoded_cache = None
            raise DecodeError(str(error)) from None
        except Exception as error:
            raise error.with_traceback(None) from None
        return decoded

    def _reraise_error(self, callback: Callable[[Any, Exception], object] | None = None) -> None:
        """Pass the first error to `callback`, or raise it."""
        error = self.errors[0][1]
        if callback is None:
            raise error
        callback(self, error)

    def forget(self) -> None:
        """Drop what was received. The message can still be acknowledged."""
        self.errors, self.body, self._decoded_cache = [], b"", None


class RedisMessage(BrokerMessage, _virtual.Message):  # type: ignore[misc]
    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        super().__init__(payload, channel=channel, **options)
        self.queue = payload.get("queue", "")

    def forget(self) -> None:
        super().forget()
        self._raw = None


class RabbitMessage(BrokerMessage, _pyamqp.Message):  # type: ignore[misc]
    def __init__(self, content: Any, channel: Any = None, **options: Any) -> None:
        super().__init__(content, channel=channel, **options)
        self.queue = getattr(content, "queue", "")
        if reason := getattr(content, "unreadable", None):
            self.errors.append((DecodeError, DecodeError(reason), None))
