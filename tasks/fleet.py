"""The fleet, from outside: what each worker reports about itself, and how to cancel a task or drain a worker.

Every worker writes one field of the hash `petiole:workers`, every `REPORT_INTERVAL_S`: the time of the report on
Redis's own clock, a space, and the report as JSON. So the ages of all reports compare, whatever the hosts'
clocks say. A worker that ends removes its field; one that dies is shown as lost, and forgotten after an hour.
"""

from __future__ import annotations

import logging
from typing import Any

import redis
from celery import Celery
from celery.states import PENDING, RECEIVED
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tasks import connections
from tasks.app import app as celery_app
from tasks.schemas import stream_keys
from tasks.settings import settings

logger = logging.getLogger(__name__)

WORKERS_KEY = "petiole:workers"
QUARANTINE_KEY = "petiole:quarantine"
REPORT_INTERVAL_S = 2.0
LOST_AFTER_S = 3 * REPORT_INTERVAL_S
FORGOTTEN_AFTER_S = 3600

_IMPATIENT = {
    **dict.fromkeys(("socket_connect_timeout", "socket_timeout"), connections.CONNECT_TIMEOUT_S),  # Redis's
    "read_timeout": connections.CONNECT_TIMEOUT_S,  # RabbitMQ's
}
"""Transport options of who would otherwise wait for ever for a broker that hangs."""

# KEYS[1] the hash; ARGV: worker, report, seconds after which all is forgotten
_REPORT = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], now[1] .. '.' .. string.format('%06d', now[2]) .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


class Distribution(BaseModel):
    """How often something took how much: `counts[i]` times more than `bounds[i - 1]`, and at most `bounds[i]`."""

    bounds: list[float]
    counts: list[int]
    sum: float

    @model_validator(mode="after")
    def _counts_all(self) -> Distribution:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("must have a count for each bound, and one for what is above")
        return self


class WorkerReport(BaseModel):
    """What a worker says about itself. Counts are since it began. `age_s` is filled in by who reads it."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    worker: str
    state: str = "ready"  # starting, ready, draining
    model: str = ""
    device: str = ""
    slots: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    hit_rate: float = 0.0  # share of prompt tokens found in the prefix cache
    tokens_per_s: float = 0.0
    lease_age_s: float = 0.0  # since the leases were last renewed
    streams_behind_s: float = 0.0  # since a flush of the streams first failed, while it fails
    prompt_tokens: int = 0  # computed, so without those found in the prefix cache
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}  # ends of generations, by finish reason
    cached_prompt_tokens: int = 0  # of those that have ended
    distributions: dict[str, Distribution] = {}  # seconds and tokens of those that have ended
    age_s: float | None = None

    @property
    def pages_used(self) -> int:
        """By sequences that run."""
        return self.pages_total - self.pages_free - self.pages_cached

    @property
    def lost(self) -> bool:
        return self.age_s is not None and self.age_s > LOST_AFTER_S


def report(client: redis.Redis, worker: WorkerReport) -> None:
    """The worker's half: one round trip."""
    message = worker.model_dump_json(exclude={"age_s"})
    client.eval(_REPORT, 1, WORKERS_KEY, worker.worker, message, str(FORGOTTEN_AFTER_S))


def withdraw(client: redis.Redis, worker: str) -> None:
    """A worker that ends says so."""
    client.hdel(WORKERS_KEY, worker)


def workers(client: redis.Redis | None = None) -> list[WorkerReport]:
    """Every worker that has reported within the last hour, by name."""
    client = client or connections.streams()
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(WORKERS_KEY)
        (seconds, microseconds), fields = pipe.execute()
    now = seconds + microseconds / 1e6
    found = []
    for name, value in fields.items():
        at, _, message = value.partition(b" ")
        try:
            age_s = max(0.0, now - float(at))
            if age_s > FORGOTTEN_AFTER_S:
                client.hdel(WORKERS_KEY, name)
                continue
            worker = WorkerReport.model_validate_json(message)
        except ValueError as error:  # of another version, perhaps: it shall not hide the others
            logger.warning("the report of %s cannot be read: %s", name.decode(errors="replace"), _in_a_line(error))
            continue
        found.append(worker.model_copy(update={"age_s": round(age_s, 1)}))
    return sorted(found, key=lambda worker: worker.worker)


def _in_a_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def queue_lengths(app: Celery = celery_app) -> dict[str, int]:
    """Messages that wait in the broker, by queue: that of all, and one for each tenant with a share."""
    configured = settings()
    names = [configured.queue, *(f"{configured.queue}.{tenant}" for tenant in configured.weights)]
    with app.connection_for_read(transport_options=_IMPATIENT) as connection:
        connection.connect()
        return {name: _length(connection, name) for name in names}


def _length(connection: Any, queue: str) -> int:
    with connection.channel() as channel:
        try:
            return int(channel.queue_declare(queue, passive=True).message_count)
        except redis.RedisError:  # kombu counts some of these among the next, such as a right that is missing
            raise
        except connection.channel_errors:  # nobody has sent anything yet
            return 0


def state_of(task_id: str, app: Celery = celery_app) -> str:
    """Celery's; `PENDING` only if no worker has heard of the task: it waits in a queue, or there is none."""
    keys, state = stream_keys(task_id), app.AsyncResult(task_id).state
    if state == PENDING:
        client = connections.streams()  # with what a producer's rights allow
        return str(RECEIVED if client.llen(keys.log) or client.hgetall(keys.state) else PENDING)
    return str(state)


def cancel(task: Any, app: Celery = celery_app) -> None:
    """Cancel a task, given its `AsyncResult` or its id, wherever it is: queued, running, or between two workers.

    Celery's `revoke` reaches the workers that live now; the flag reaches the one that gets the task next.
    """
    task_id = task if isinstance(task, str) else str(task.id)
    flag_cancel(task_id)
    app.control.revoke(task_id, terminate=True)


def flag_cancel(task_id: str) -> None:
    """Say in Redis that the task shall end, for the worker that has it or will have it."""
    state = stream_keys(task_id).state
    with connections.streams().pipeline(transaction=False) as pipe:
        pipe.hset(state, "cancel", 1)
        pipe.expire(state, settings().stream_ttl_s)
        pipe.execute()


def drain(worker: str, app: Celery = celery_app) -> None:
    """Ask a worker to end: to take no more tasks, finish what it can in `drain_seconds`, hand back the rest."""
    app.control.shutdown(destination=[worker])
