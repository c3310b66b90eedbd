"""Petiole's own pools of connections and producers, one pair for each process.

kombu keeps the pools of all Celery apps of a process in two groups, and one limit for all of them: the app that is
used last sets it. kombu then resizes the pools of the other apps, and raises an error if one of them is in use and
has to shrink. Petiole's pools are in no group. So Petiole's limit does not change the pools of other apps, nor
theirs Petiole's.

A forked child makes pools of its own. kombu notices only billiard's forks, not those of `gunicorn --preload` or
uWSGI, whose workers would share RabbitMQ's connections and mix their messages. The child keeps the pools that it
has inherited, and does not use them: if it closed or collected amqp's connections, the parent's would be closed,
too.

Celery sends all tasks of a group with one producer, that of the app of the first task. So a producer of Petiole's
may get a message of another app, whose broker may be another. It passes the message on to that app's producers.
(The other way round, Petiole's tasks do not take a producer from a group: `submission.task`.)"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from celery import Celery
from kombu import messaging
from kombu.connection import ConnectionPool
from kombu.pools import ProducerPool

from petiole import _lazy
from petiole.tasks.app import interop

if TYPE_CHECKING:
    from petiole.tasks.app import redis_transport as publishing
else:
    publishing = _lazy.module("petiole.tasks.app.redis_transport")


class Connections(ConnectionPool):
    close_after_fork = False

    def __init__(self, connection: Any, limit: int) -> None:
        stock: Any = super()
        stock.__init__(connection, limit=limit)

    def new(self) -> Any:
        stock: Any = super()
        return publishing.through(stock.new())


class Producer(messaging.Producer):
    app: Celery
    connection: Any
    _channel: Any

    @property
    def is_collecting(self) -> bool:
        """Whether what is published is not sent (`redis_transport`)."""
        return getattr(self._channel, "is_collecting", False)

    def publish(self, body: Any, *more: Any, **options: Any) -> Any:
        theirs = interop.elsewhere(self.app, options.get("reply_to"))
        if theirs is None:
            stock: Any = super()
            return stock.publish(body, *more, **options)
        with theirs.producer_or_acquire() as producer:
            return producer.publish(body, *more, **options)

    def maybe_declare(self, entity: Any, retry: bool = False, **policy: Any) -> Any:
        """kombu copies the queue, and binds the copy, before it looks whether the queue is declared already."""
        if entity.can_cache_declaration and hash(entity) in self.connection.declared_entities:
            return False
        stock: Any = super()
        return stock.maybe_declare(entity, retry, **policy)


class Producers(ProducerPool):
    close_after_fork = False

    def __init__(self, app: Celery, **connection: Any) -> None:
        limit = app.conf.broker_pool_limit or 0
        kind = type("Producer", (Producer,), {"app": app})
        stock: Any = super()
        stock.__init__(Connections(app.connection_for_write(**connection), limit), limit=limit, Producer=kind)


class ConnectionPools:
    """The pools of an app: those of the process that asks. `connection`: options of the connections."""

    def __init__(self, app: Celery, **connection: Any) -> None:
        self._app, self._connection = app, connection
        self._of_process: dict[int, Producers] = {}

    @property
    def made(self) -> bool:
        """Whether this process has pools, and so perhaps connections."""
        return os.getpid() in self._of_process

    @property
    def producers(self) -> Any:
        process = os.getpid()
        found = self._of_process.get(process)
        if found is None:  # another thread may make it at the same time: all take the first
            found = self._of_process.setdefault(process, Producers(self._app, **self._connection))
        return found

    @property
    def connections(self) -> Any:
        return self.producers.connections
