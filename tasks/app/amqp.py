"""How Celery declares this app's queues, makes the messages that go there, and reaches the broker.

On Redis, queues that producers name are listed in one place. On RabbitMQ, tasks behave as on Redis: the queues are
quorum queues. A consumer of a quorum queue never holds more messages than its first prefetch count.
That many tasks with an eta would block a worker. So tasks with an eta wait in RabbitMQ, by Celery's native delayed
delivery, which needs exchanges of the type topic."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import kombu
from amqp.exceptions import NotFound
from celery import Celery
from celery.app import amqp as stock
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import messaging
from kombu.connection import ConnectionPool
from kombu.pools import ProducerPool

from petiole import _lazy
from petiole.tasks.app import interop
from petiole.tasks.errors import Unavailable
from petiole.tasks.traces import carried
from petiole.tasks.wire.keys import EXCHANGE_TYPE, QUEUE_TYPE

if TYPE_CHECKING:
    from petiole.tasks.app import redis_transport as publishing
else:
    publishing = _lazy.module("petiole.tasks.app.redis_transport")

_kombu: Any = kombu  # kombu is only partly typed


class ForeignQueue(_kombu.Queue):  # type: ignore[misc]
    """A queue that may be another app's, of a type that this app does not know. RabbitMQ refuses to declare an
    existing queue with another type, so this queue is declared only if it is missing."""

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        connection: Any = (channel or self.channel).connection
        with connection.channel() as looking:  # the error closes its channel
            try:
                looking.queue_declare(queue=self.name, passive=True)
            except NotFound:
                return super().declare(nowait, channel)
        return self.name


class ListedQueue(_kombu.Queue):  # type: ignore[misc]
    """A queue of Celery's defaults that is also bound to the exchange `listed_in`."""

    attrs = (*_kombu.Queue.attrs, ("listed_in", str))

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        name = super().declare(nowait, channel)
        _kombu.Exchange(self.listed_in)(channel or self.channel).declare(nowait=nowait)
        self.bind_to(self.listed_in, self.name, nowait=nowait, channel=channel)
        return name


class Queues(stock.Queues):  # type: ignore[misc]
    """The queues of this app. On Redis all are bound to the default queue's exchange, too, so whoever counts
    messages finds each queue that a producer has named. On RabbitMQ, a queue whose name begins with the default
    queue's, such as `petiole.large`, is declared like the default queue. Any other queue is declared with Celery's
    defaults, if it is missing."""

    def new_missing(self, name: str) -> Any:
        default = self.default_exchange
        missing = super().new_missing(name)
        if default.type != EXCHANGE_TYPE:
            return ListedQueue(
                name, missing.exchange, name, queue_arguments=missing.queue_arguments, listed_in=default.name
            )
        if name.startswith(f"{default.name}."):
            exchange = _kombu.Exchange(name, EXCHANGE_TYPE)
            return _kombu.Queue(name, exchange, name, queue_arguments={"x-queue-type": QUEUE_TYPE})
        return ForeignQueue(name, missing.exchange, name, queue_arguments=missing.queue_arguments)


def whole_second(
    countdown: float | None, eta: datetime | str | None, now: datetime
) -> tuple[float | None, datetime | str | None]:
    """`countdown` and `eta`, with at least a second to wait: native delayed delivery counts whole seconds, and
    raises ValueError for zero."""
    at = maybe_iso8601(eta)
    wait_s = (maybe_make_aware(at) - maybe_make_aware(now)).total_seconds() if at else countdown or 0
    return (1, None) if 0 < wait_s < 1 else (countdown, eta)


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


class Connections(ConnectionPool):
    close_after_fork = False

    def __init__(self, connection: Any, limit: int) -> None:
        stock: Any = super()
        stock.__init__(connection, limit=limit)

    def new(self) -> Any:
        stock: Any = super()
        return publishing.through(stock.new())


class Producer(messaging.Producer):
    """Celery sends all tasks of a group with one producer, that of the app of the first task. So a producer of
    Petiole's may get a message of another app, whose broker may be another. It passes the message on to that app's
    producers. (The other way round, Petiole's tasks do not take a producer from a group: `submission.task`.)"""

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
    """Petiole's own pools of connections and producers, one pair for each process. `connection`: options of the
    connections.

    kombu keeps the pools of all Celery apps of a process in two groups, and one limit for all of them: the app
    that is used last sets it. kombu then resizes the pools of the other apps, and raises an error if one of them
    is in use and has to shrink. Petiole's pools are in no group. So Petiole's limit does not change the pools of
    other apps, nor theirs Petiole's.

    A forked child makes pools of its own. kombu notices only billiard's forks, not those of `gunicorn --preload`
    or uWSGI, whose workers would share RabbitMQ's connections and mix their messages. The child keeps the pools
    that it has inherited, and does not use them: if it closed or collected amqp's connections, the parent's would
    be closed, too."""

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


PAUSE_S = 1.0


class _BreakerState:
    def __init__(self) -> None:
        self.known: Unavailable | None = None
        self.probe_at = 0.0
        self.probing = threading.Lock()


class Breaker:
    """Fails submissions at once while the broker is known to be away. It has a state for each process: a forked
    child begins with a closed one.

    A submission tries for some seconds (`configuration.PUBLISH_RETRY_POLICY`). While one tries, others try, too.
    When one has tried in vain, the breaker is open:

        closed ──a caller tries in vain──► open ──`PAUSE_S` later, for one caller──► probing
           ▲                                 ▲                                          │
           └───────────── the probe succeeds ┼──────────────── it fails ────────────────┘

    While it is open, and while somebody else probes, callers fail at once with the reason that is known. So a
    thousand callers of a broker that is down fail together, and none waits for the others' retries."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._of_process: dict[int, _BreakerState] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context for one submission, in which `Unavailable` says that the caller has tried in vain. Raises
        `Unavailable` at once while the breaker is open."""
        state = self._state()
        known = state.known  # read once: another thread may close or open the breaker meanwhile
        if known is not None and not self._may_probe(state):
            raise Unavailable(known.url, known.reason)
        try:
            yield
        except Unavailable as error:
            state.known, state.probe_at = error, self._now() + PAUSE_S
            raise
        else:
            state.known = None
        finally:
            if known is not None:
                state.probing.release()

    def check(self) -> None:
        """Raises `Unavailable` if the next attempt would raise it at once. It needs no attempt after it."""
        state = self._state()
        known = state.known
        if known is not None and (self._now() < state.probe_at or state.probing.locked()):
            raise Unavailable(known.url, known.reason)

    def _state(self) -> _BreakerState:
        process = os.getpid()
        return self._of_process.get(process) or self._of_process.setdefault(process, _BreakerState())

    def _may_probe(self, state: _BreakerState) -> bool:
        return self._now() >= state.probe_at and state.probing.acquire(blocking=False)
