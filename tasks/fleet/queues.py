"""How many messages wait in the broker, by queue and priority."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import redis
from celery import Celery
from kombu.transport.redis import Channel as RedisChannel
from pydantic import BaseModel

from petiole.contract.requests.count import SUFFIX
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.fleet import models, reports
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.servers import connections
from petiole.tasks.servers.replies import is_damage
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import is_own

logger = logging.getLogger(__name__)

_TIMEOUTS = {
    **dict.fromkeys(("socket_connect_timeout", "socket_timeout"), connections.CONNECT_TIMEOUT_S),  # Redis's
    "read_timeout": connections.CONNECT_TIMEOUT_S,  # RabbitMQ's
}
"""Transport options that limit the wait for a broker that hangs. Without them the wait has no limit."""


def queue_lengths(app: Celery = celery_app, others: Iterable[str] = ()) -> dict[tuple[str, int | None], int]:
    """Numbers of messages in the broker, by queue and priority. The queues are the default one, one for each
    tenant with a weight, and `others`; and those with messages to which producers have sent. On RabbitMQ, which
    counts all priorities together, the priority is None."""
    names = _configured()
    names += sorted(set(others).difference(names))
    with app.connection_for_read(transport_options=_TIMEOUTS) as connection:
        connection.connect()
        lengths = _lengths(connection, names)
    return {(name, priority): length for name, of in lengths.items() for priority, length in of.items()}


def _lengths(connection: Any, names: Sequence[str]) -> dict[str, dict[int | None, int]]:
    """By queue and priority: all on Redis in one round trip. On RabbitMQ each has a channel, which a queue that
    does not exist yet closes."""
    with connection.channel() as channel:
        if isinstance(channel, RedisChannel):
            found = list_lengths(channel, [*names, *sorted(_sent_to(channel).difference(names))])
            return {name: counted for name, counted in found.items() if name in names or any(counted.values())}
    return {name: {None: _declared(connection, name)} for name in names}


def _declared(connection: Any, name: str) -> int:
    with connection.channel() as channel:
        try:
            return int(channel.queue_declare(name, passive=True).message_count)
        except connection.channel_errors:  # the queue does not exist yet
            return 0


def _sent_to(channel: Any) -> set[str]:
    """The queues to which producers of Petiole's app have ever sent, of those whose names begin with the default
    queue's. Empty for a user who may not ask."""
    try:
        bound = channel.get_table(settings().queue)
    except redis.ResponseError:
        return set()
    own = re.compile(rf"{re.escape(settings().queue)}\..*(?<!{re.escape(SUFFIX)})", re.DOTALL)
    return {names[-1] for names in bound if own.fullmatch(names[-1])}


def _configured() -> list[str]:
    """The queues of the settings."""
    queue, weights = settings().queue, settings().weights
    return [queue, *(f"{queue}.{tenant}" for tenant in weights)]


def known_queues() -> list[str]:
    """The fleet's queues: those of the settings, of the workers of the last hour, and of the models of the last
    days."""
    taken = {name for worker in reports.workers() for name in worker.queues}
    served = {name for model in models.models() for name in (*model.queues, *model.own_queues)}
    return sorted(taken.union(served, _configured()))


async def aqueue_length(queue: str | None = None) -> int:
    """Messages that wait in a queue, by default Petiole's, of all priorities. On Redis it needs no thread, and no
    connection beside those of the event loop. On RabbitMQ a thread asks."""
    name = queue or settings().queue
    if scheme(settings().broker_url) in RABBITMQ:
        found = await LOOKUPS.run(queue_lengths, celery_app, [name])
        return sum(length for (of, _), length in found.items() if of == name)
    options = celery_app.conf.broker_transport_options
    prefix, separator = options.get("global_keyprefix", ""), options.get("sep", RedisChannel.sep)
    async with connections.async_broker().pipeline(transaction=False) as pipe:
        for priority in options.get("priority_steps", RedisChannel.priority_steps):
            pipe.llen(f"{prefix}{name}{separator}{priority}" if priority else f"{prefix}{name}")
        lengths = await pipe.execute(raise_on_error=False)
    for length in lengths:
        if isinstance(length, Exception) and not is_damage(length):
            raise length
    return sum(length for length in lengths if isinstance(length, int))


class QueueReport(BaseModel):
    """A queue: how many tasks wait in it, by priority (None on RabbitMQ, which counts all together), and how many
    live workers take from it. `known`: it is the fleet's (`known_queues`). Others are misspelt, or another
    application's."""

    queue: str
    waiting: int
    by_priority: dict[int | None, int]
    workers: int
    known: bool = True


def report_queues(reports: Sequence[WorkerReport], app: Celery = celery_app) -> list[QueueReport]:
    """Reports on the default queue, the tenants' queues, and each queue from which a worker of the last hour
    takes. Those of a model alone are shown only while tasks wait there."""
    named = {name for worker in reports for name in worker.queues}
    lengths: dict[str, dict[int | None, int]] = {}
    for (name, priority), length in queue_lengths(app, named).items():
        lengths.setdefault(name, {})[priority] = length
    known = known_queues()
    live = Counter(name for worker in reports if not worker.lost for name in worker.queues)
    return [
        QueueReport(
            queue=name,
            waiting=sum(counted.values()),
            by_priority=counted,
            workers=live[name],
            known=name in known,
        )
        for name, counted in lengths.items()
        if not is_own(name) or any(counted.values())
    ]


def list_lengths(channel: Any, names: Iterable[str]) -> dict[str, dict[int | None, int]]:
    """The lengths of queues' lists on Redis, by queue and priority. A key that is not a list is left out."""
    lists = [(name, step, channel._q_for_pri(name, step)) for name in names for step in channel.priority_steps]
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for _, _, key in lists:
            pipe.llen(key)
        lengths = pipe.execute(raise_on_error=False)
    found: dict[str, dict[int | None, int]] = {}
    for (name, priority, key), length in zip(lists, lengths, strict=True):
        counted = found.setdefault(name, {})
        if is_damage(length):
            logger.warning("queue %s: key %r cannot be counted: %s", name, key, length)
        elif isinstance(length, Exception):
            raise length
        else:
            counted[int(priority)] = length
    return found
