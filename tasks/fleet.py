"""View and control of the fleet: workers' reports, cancelling a task, draining a worker.

Every `REPORT_INTERVAL_S` each worker writes its field of the hash `petiole:workers`: the time of the report by
Redis's clock, a space, and the report as JSON. So the ages of all reports are comparable even if the hosts' clocks
differ. A worker that shuts down removes its field; one that dies is shown as lost, and removed after an hour.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult
from celery.states import PENDING, RECEIVED
from kombu.transport.redis import Channel as RedisChannel
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tasks import connections
from tasks.app import app as celery_app
from tasks.masters import wrong_type
from tasks.schemas import stream_keys
from tasks.settings import settings

logger = logging.getLogger(__name__)

WORKERS_KEY = "petiole:workers"
QUARANTINE_KEY = "petiole:quarantine"
REPORT_INTERVAL_S = 2.0
LOST_AFTER_S = 3 * REPORT_INTERVAL_S
FORGOTTEN_AFTER_S = 3600
CANCELLED_FOR_S = 30 * 86_400
"""Time to live of the cancel flag of a task that no worker has ended: it may wait in a queue, or for its eta. The
flag is a field of a small hash, which expires sooner once the task has ended."""

_FLAGS_A_CALL = 1000

_TIMEOUTS = {
    **dict.fromkeys(("socket_connect_timeout", "socket_timeout"), connections.CONNECT_TIMEOUT_S),  # Redis's
    "read_timeout": connections.CONNECT_TIMEOUT_S,  # RabbitMQ's
}
"""Transport options that limit the wait for a broker that hangs, for ever by default."""

# KEYS[1] the hash; ARGV: worker, report, TTL of the hash in seconds
_REPORT = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], now[1] .. '.' .. string.format('%06d', now[2]) .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


def version() -> str:
    """Petiole's version; "" if it is not installed."""
    try:
        return installed("petiole")
    except PackageNotFoundError:
        return ""


class Distribution(BaseModel):
    """A histogram: `counts[i]` values are above `bounds[i - 1]` and at most `bounds[i]`; `sum` adds up all."""

    bounds: list[float]
    counts: list[int]
    sum: float

    @model_validator(mode="after")
    def _counts_all(self) -> Distribution:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("must have a count for each bound, and one for what is above")
        return self


class WorkerReport(BaseModel):
    """A worker's report. Counts are since the worker's start. `age_s` is filled in by the reader."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    worker: str
    state: str = "ready"  # ready, draining
    version: str = ""  # Petiole's
    model: str = ""
    device: str = ""
    queues: list[str] = []  # it takes tasks from
    slots: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    hit_rate: float = 0.0  # share of prompt tokens found in the prefix cache
    tokens_per_s: float = 0.0
    lease_age_s: float = 0.0  # since the leases were last renewed
    streams_behind_s: float = 0.0  # since the first failed flush of the streams; 0 while flushes succeed
    prompt_tokens: int = 0  # computed: those found in the prefix cache are not included
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}  # ended generations, by finish reason
    cached_prompt_tokens: int = 0  # of ended generations
    distributions: dict[str, Distribution] = {}  # seconds and tokens of ended generations
    broker_s: dict[str, Distribution] = {}  # seconds that tasks waited in the broker, by priority
    age_s: float | None = None

    @property
    def pages_used(self) -> int:
        """Pages held by running sequences."""
        return self.pages_total - self.pages_free - self.pages_cached

    @property
    def lost(self) -> bool:
        return self.age_s is not None and self.age_s > LOST_AFTER_S


def report(client: redis.Redis, worker: WorkerReport) -> None:
    """Store a worker's report, in one round trip."""
    message = worker.model_dump_json(exclude={"age_s"})
    client.eval(_REPORT, 1, WORKERS_KEY, worker.worker, message, str(FORGOTTEN_AFTER_S))


def withdraw(client: redis.Redis, worker: str) -> None:
    """Remove the report of a worker that shuts down."""
    client.hdel(WORKERS_KEY, worker)


def workers(client: redis.Redis | None = None) -> list[WorkerReport]:
    """The reports of the last hour, sorted by worker name."""
    client = client or connections.streams()
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(WORKERS_KEY)
        (seconds, microseconds), fields = pipe.execute()
    now = seconds + microseconds / 1e6
    reports = []
    for name, value in fields.items():
        at, _, message = value.partition(b" ")
        try:
            age_s = max(0.0, now - float(at))
            if age_s > FORGOTTEN_AFTER_S:
                client.hdel(WORKERS_KEY, name)
                continue
            worker = WorkerReport.model_validate_json(message)
        except ValueError as error:  # perhaps another version's: skip it, and show the others
            logger.warning("the report of %s cannot be read: %s", name.decode(errors="replace"), _in_a_line(error))
            continue
        reports.append(worker.model_copy(update={"age_s": round(age_s, 1)}))
    return sorted(reports, key=lambda worker: worker.worker)


def _in_a_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def queue_lengths(app: Celery = celery_app, others: Iterable[str] = ()) -> dict[tuple[str, int | None], int]:
    """Messages in the broker, by queue and priority: in the default queue, one for each tenant with a weight, and
    `others`. The priority is None on RabbitMQ, which counts them together."""
    configured = settings()
    names = [configured.queue, *(f"{configured.queue}.{tenant}" for tenant in configured.weights)]
    names += sorted(set(others).difference(names))
    with app.connection_for_read(transport_options=_TIMEOUTS) as connection:
        connection.connect()
        return {
            (name, priority): length for name in names for priority, length in _lengths(connection, name).items()
        }


def _lengths(connection: Any, queue: str) -> dict[int | None, int]:
    """A queue's messages, by priority."""
    with connection.channel() as channel:
        if isinstance(channel, RedisChannel):
            return list_lengths(channel, queue)
        try:
            return {None: int(channel.queue_declare(queue, passive=True).message_count)}
        except connection.channel_errors:  # the queue does not exist yet
            return {None: 0}


def list_lengths(channel: Any, queue: str) -> dict[int | None, int]:
    """The lengths of a queue's lists on Redis, by priority. A key that is no list is left out."""
    lists = {priority: channel._q_for_pri(queue, priority) for priority in channel.priority_steps}
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for key in lists.values():
            pipe.llen(key)
        lengths = pipe.execute(raise_on_error=False)
    found: dict[int | None, int] = {}
    for (priority, key), length in zip(lists.items(), lengths, strict=True):
        if wrong_type(length):
            logger.warning("queue %s: key %r cannot be counted: %s", queue, key, length)
        elif isinstance(length, Exception):
            raise length
        else:
            found[int(priority)] = length
    return found


def state_of(task_id: str, app: Celery = celery_app) -> str:
    """The task's Celery state. `PENDING` only if no worker has received it: it is queued, or does not exist."""
    keys, state = stream_keys(task_id), app.AsyncResult(task_id).state
    if state == PENDING:
        client = connections.streams()  # only commands that a producer's ACL allows
        return str(RECEIVED if client.llen(keys.log) or client.hgetall(keys.state) else PENDING)
    return str(state)


def cancel(task: AsyncResult | str, app: Celery = celery_app) -> None:
    """Cancel a task, given its `AsyncResult` or its id, wherever it is: queued, running, or between two workers.

    Celery's `revoke` reaches the workers that are running now, the flag in Redis the next one to get the task.
    """
    task_id = task if isinstance(task, str) else str(task.id)
    flag_cancel(task_id)
    app.control.revoke(task_id, terminate=True)


def flag_cancel(*task_ids: str) -> None:
    """Set the cancel flag in Redis, for the workers that have the tasks or get them next."""
    ttl_s = settings().stream_ttl_s
    for start in range(0, len(task_ids), _FLAGS_A_CALL):
        states = [stream_keys(task_id).state for task_id in task_ids[start : start + _FLAGS_A_CALL]]
        with connections.streams().pipeline(transaction=False) as pipe:
            for state in states:
                pipe.hgetall(state)  # a command that a producer's ACL allows
            known = pipe.execute(raise_on_error=False)  # a damaged state holds up no other
            for state, fields in zip(states, known, strict=True):
                ended = isinstance(fields, dict) and b"done" in fields
                pipe.hset(state, "cancel", 1)
                pipe.expire(state, ttl_s if ended else max(ttl_s, CANCELLED_FOR_S))
            pipe.execute()


def drain(worker: str, app: Celery = celery_app) -> None:
    """Shut a worker down warmly: it takes no more tasks, runs on for `drain_seconds`, and hands back the rest."""
    app.control.shutdown(destination=[worker])
