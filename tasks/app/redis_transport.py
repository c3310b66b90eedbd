"""How this app uses Redis as a client: with one connection for each channel, with replicas' confirmation where
asked, and without touching the messages of others.

kombu makes a new client for every message, which takes a fifth of the time of a submission. A channel belongs to
one thread at a time, and so may its client.

A replicated Redis replies before its replicas have a write. If the primary dies right after the reply, the replica
that takes its place may not have the message. A submission that asks for confirmation sends `WAIT` after the
message, on the same connection: `WAIT` covers the writes of its own connection only. On RabbitMQ a quorum queue
has a message on a majority of nodes before it confirms.

Whoever waits for the answer to a control command consumes a queue. Each consumer of kombu's looks for messages
that a worker of stock Celery has held for longer than the `visibility_timeout`, and puts them back into their
queues. That timeout is each app's own: a look with Petiole's would run the long tasks of another app twice.
Here nobody looks.

To broadcast a command (`revoke`, and so `tasks.cancel`), Celery takes a connection of the pool, and then a second
one to publish. If as many callers as the pool has connections broadcast at once, they wait for each other for
ever, and so does each later `delay()`. Here a broadcast takes one connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import redis
from celery.app import control
from kombu import pidbox
from kombu.transport import redis as stock
from kombu.utils.uuid import uuid

from petiole.tasks.errors import Unconfirmed
from petiole.tasks.servers.replies import is_damage


class Confirmation(NamedTuple):
    """At least this many replicas must have the message within this time."""

    replicas: int
    timeout_s: float


_wanted: ContextVar[Confirmation | None] = ContextVar("confirmation", default=None)


@dataclass(slots=True)
class Push:
    """A message that is pushed later, with its key. `error`: why it could not be pushed, if others could."""

    key: str
    message: str
    confirmation: Confirmation | None = field(default_factory=_wanted.get)
    sent: bool = False
    error: Exception | None = None


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
    """The same connection; if it is one to Redis, its channels publish as this module says. At a failover kombu
    switches to the next URL, and would leave the connection with the stock transport of that URL."""
    kind = connection.get_transport_cls()
    if isinstance(kind, type) and issubclass(kind, stock.Transport) and not issubclass(kind.Channel, _Channel):
        unacknowledged = type("QoS", (_RestoresNothing, kind.Channel.QoS), {})
        channel = type("Channel", (_Channel, kind.Channel), {"QoS": unacknowledged})
        connection.transport_cls = type(
            kind.__name__, (kind,), {"Channel": channel, "__module__": kind.__module__}
        )
        stock_switch = type(connection).switch

        def switch(url: str) -> None:
            stock_switch(connection, url)
            through(connection)

        connection.switch = switch
    return connection


class _RestoresNothing:
    """A mixin of the messages that a channel holds."""

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


class _Channel:
    """A mixin of kombu's Redis channels."""

    pool: Any
    _client_of_pool: Any = None
    _tags: Iterator[str] | None = None

    def _next_delivery_tag(self) -> str:
        """A tag of its own for each message. kombu asks the system for random bytes for each."""
        if self._tags is None:
            mine = uuid()
            self._tags = (f"{mine}-{number}" for number in count())
        return next(self._tags)

    def _create_client(self, asynchronous: bool = False) -> Any:
        made: Any = super()
        if asynchronous:
            return made._create_client(asynchronous=True)
        if self._client_of_pool is None or self._client_of_pool.connection_pool is not self.pool:
            self._client_of_pool = made._create_client()
        return self._client_of_pool

    @property
    def is_collecting(self) -> bool:
        return isinstance(self._client_of_pool, _Collecting)

    @contextmanager
    def collecting(self) -> Iterator[list[Push]]:
        """A context in which messages are not sent, but collected."""
        client, pushes = self._create_client(), list[Push]()
        self._client_of_pool = _Collecting(client, pushes)
        try:
            yield pushes
        finally:
            self._client_of_pool = client

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        put: Any = super()
        if _wanted.get() is None or self.is_collecting:
            put._put(queue, message, **options)
            return
        with self.collecting() as pushes:
            put._put(queue, message, **options)
        self.push(pushes)
        for push in pushes:
            if push.error is not None:
                raise push.error

    def push(self, pushes: Sequence[Push]) -> None:
        """Push all in one round trip, and those with a confirmation in one more. Raises the error of a lost
        connection: what is then neither `sent` nor has an `error` can be pushed again."""
        wanted = {one.confirmation for one in pushes}
        for confirmation in sorted(wanted, key=bool):  # None, which need not wait, first
            some, failure = [one for one in pushes if one.confirmation == confirmation], None
            for one, reply in zip(some, self._replies(some, confirmation), strict=True):
                if isinstance(reply, Unconfirmed) or is_damage(reply):
                    one.error = reply
                elif isinstance(reply, Exception):
                    failure = reply
                else:
                    one.sent = True
            if failure is not None:
                raise failure

    def _replies(self, pushes: Sequence[Push], confirmation: Confirmation | None) -> list[Any]:
        """Some of them may be exceptions."""
        client = self._create_client()
        if confirmation is None and len(pushes) == 1:  # a pipeline of one command takes a fifth longer
            try:
                return [client.lpush(pushes[0].key, pushes[0].message)]
            except redis.ResponseError as error:
                return [error]
        with client.pipeline(transaction=False) as pipe:
            for one in pushes:
                pipe.lpush(one.key, one.message)
            if confirmation is None:
                return list(pipe.execute(raise_on_error=False))
            replicas, timeout_s = confirmation
            pipe.execute_command("WAIT", replicas, max(1, round(1000 * timeout_s)))
            *replies, have = pipe.execute(raise_on_error=False)
        if isinstance(have, Exception):
            raise have
        if have >= replicas:
            return list(replies)
        return [one if isinstance(one, Exception) else Unconfirmed(have, replicas, timeout_s) for one in replies]


class _Collecting:
    """A client whose pushes are collected."""

    def __init__(self, client: Any, pushes: list[Push]) -> None:
        self._client, self._pushes = client, pushes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lpush(self, key: str, message: str) -> None:
        self._pushes.append(Push(key, message))


class BroadcastMailbox(pidbox.Mailbox):
    def __call__(self, connection: Any) -> Any:
        """A mailbox for one broadcast, which publishes on `connection`."""
        bound: Any = super().__call__(connection)  # type: ignore[no-untyped-call]
        bound.producer_pool = None
        return bound


class Control(control.Control):  # type: ignore[misc]
    Mailbox = BroadcastMailbox
