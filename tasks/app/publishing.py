"""How this app uses Redis as a client: with one connection for each channel, with replicas' confirmation where
asked, and without touching the messages of others.

kombu makes a new client for every message, which takes a fifth of the time of a submission. A channel belongs to
one thread at a time, and so may its client.

A replicated Redis replies before its replicas have a write. If the primary dies right after the reply, the replica
that takes its place may not have the message. A submission that asks for confirmation sends `WAIT` behind the
message, on the same connection: `WAIT` covers the writes of its own connection only. On RabbitMQ a quorum queue
has a message on a majority of nodes before it confirms.

Whoever waits for the answer to a control command consumes a queue. Each consumer of kombu's looks for messages
that a worker of stock Celery has held for longer than the `visibility_timeout`, and puts them back into their
queues. That timeout is each app's own: a look with Petiole's would run the long tasks of another app twice.
Here nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from kombu.transport import redis as stock

from petiole.tasks.errors import Unconfirmed


class Confirmation(NamedTuple):
    """At least this many replicas must have the message within this time."""

    replicas: int
    timeout_s: float


_wanted: ContextVar[Confirmation | None] = ContextVar("confirmation", default=None)


@contextmanager
def confirmed(wanted: Confirmation | None) -> Iterator[None]:
    """A context in which messages are published with this confirmation. Publishing raises `Unconfirmed` for a
    message that too few replicas have in time: it is in its queue nevertheless."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def through(connection: Any) -> Any:
    """The same connection; if it is one to Redis, its channels publish as this module says."""
    kind = connection.get_transport_cls()
    if isinstance(kind, type) and issubclass(kind, stock.Transport) and not issubclass(kind.Channel, _Channel):
        unacknowledged = type("QoS", (_RestoresNothing, kind.Channel.QoS), {})
        channel = type("Channel", (_Channel, kind.Channel), {"QoS": unacknowledged})
        connection.transport_cls = type(
            kind.__name__, (kind,), {"Channel": channel, "__module__": kind.__module__}
        )
    return connection


class _RestoresNothing:
    """A mixin of the messages that a channel holds."""

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


class _Channel:
    """A mixin of kombu's Redis channels."""

    pool: Any
    _client_of_pool: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        made: Any = super()
        if asynchronous:
            return made._create_client(asynchronous=True)
        if self._client_of_pool is None or self._client_of_pool.connection_pool is not self.pool:
            self._client_of_pool = made._create_client()
        return self._client_of_pool

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        put: Any = super()
        wanted = _wanted.get()
        if wanted is None:
            put._put(queue, message, **options)
            return
        client = self._create_client()
        self._client_of_pool = _Confirming(client, wanted)
        try:
            put._put(queue, message, **options)
        finally:
            self._client_of_pool = client


class _Confirming:
    """A client whose push waits for replicas."""

    def __init__(self, client: Any, wanted: Confirmation) -> None:
        self._client, self._wanted = client, wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lpush(self, key: str, *values: Any) -> Any:
        replicas, timeout_s = self._wanted
        with self._client.pipeline(transaction=False) as pipe:
            pipe.lpush(key, *values)
            pipe.execute_command("WAIT", replicas, max(1, round(1000 * timeout_s)))
            length, have = pipe.execute()
        if have < replicas:
            raise Unconfirmed(have, replicas, timeout_s)
        return length
