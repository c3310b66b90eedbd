"""Petiole's own pools of connections and producers, one pair for each process.

kombu keeps the pools of all Celery apps of a process in two groups, and one limit for all of them: the app that is
used last sets it. kombu then resizes the pools of the other apps, and raises an error if one of them is in use and
has to shrink. Petiole's pools are in no group. So Petiole's limit does not change the pools of other apps, nor
theirs Petiole's.

A forked child makes pools of its own. kombu notices only billiard's forks, not those of `gunicorn --preload` or
uWSGI, whose workers would share RabbitMQ's connections and mix their messages. The child keeps the pools that it
has inherited, and does not use them: if it closed or collected amqp's connections, the parent's would be closed,
too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kombu.connection import ConnectionPool
from kombu.pools import ProducerPool


class Connections(ConnectionPool):
    close_after_fork = False

    def __init__(self, connection: Any, limit: int) -> None:
        stock: Any = super()
        stock.__init__(connection, limit=limit)


class Producers(ProducerPool):
    close_after_fork = False

    def __init__(self, connection: Any, limit: int) -> None:
        stock: Any = super()
        stock.__init__(Connections(connection, limit), limit=limit)


class Pools:
    """The pools of an app: those of the process that asks."""

    def __init__(self, connect: Callable[[], Any], limit: Callable[[], int | None]) -> None:
        self._connect, self._limit = connect, limit
        self._of_process: dict[int, Producers] = {}

    @property
    def producers(self) -> Any:
        process = os.getpid()
        found = self._of_process.get(process)
        if found is None:  # another thread may make it at the same time: all take the first
            found = self._of_process.setdefault(process, Producers(self._connect(), self._limit() or 0))
        return found

    @property
    def connections(self) -> Any:
        return self.producers.connections
