"""Every name that Petiole writes into Redis or into a message, for all processes of a fleet.

Processes of different versions share these names: add names, but change none (docs/maintaining.md). The Lua
scripts get the names as arguments.

    of one task         `StreamKeys`
    of one image        `image_key`
    of the gateway      `gateway_key`
    of batches          `batch_key`, `batch_lease_key`, `batches_key`, `OPEN_BATCHES_KEY`, `running_batch_key`,
                        `RUNNING_BATCHES_KEY`
    of the broker       `LedgerKeys`
    of tenants          `usage_keys`, `account_keys`, `budgets_key`, `watched_key`
    of the whole fleet  `WORKERS_KEY`, `LIVES_KEY`, `MODELS_KEY`, `ADAPTERS_KEY`, `QUARANTINE_KEY`,
                        `PROBE_KEY`
    of a worker         `MARKER_PREFIX`
    queues of a model   `own_queue`; the others are settings
    in a message        `SENT_HEADER`, `AFFINITY_HEADER`, `TENANT_HEADER`, `HELD_HEADER`, `TRACEPARENT_HEADER`,
                        `TRACESTATE_HEADER`, `NAME_PROPERTY`; the rules of headers: `wire.headers`
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import NamedTuple

from petiole.contract.requests.images import HANDLE_PREFIX

WORKERS_KEY = "petiole:workers"
"""Hash: by worker, its last report (`fleet.reports`)."""

LIVES_KEY = "petiole:lives"
"""Hash: by worker, its starts and ends (`fleet.lives`)."""

MODELS_KEY = "petiole:models"
"""Hash: by fingerprint and queues, the facts of a model (`fleet.models`)."""

ADAPTERS_KEY = "petiole:adapters"
"""Hash without an end: by name, an adapter that was loaded over HTTP (`fleet.loaded_adapters`)."""

QUARANTINE_KEY = "petiole:quarantine"
"""List: messages that were set aside (`worker.broker.quarantine`)."""

PROBE_KEY = "petiole:nothing"
"""Never exists. Writing to it shows whether Redis takes writes."""

USAGE_KEY = "petiole:usage"
"""With a day after it: two hashes, what each task has used and the day's sums (`record.ledger`)."""

MARKER_PREFIX = "petiole-results-"
"""With a random part after it: the task id under which a worker stores a result of no task in its result backend.
Whoever finds that result looks for results in the right place (`fleet.availability`). It expires as results do."""

SENT_HEADER = "petiole-sent"
"""When the task was submitted, by the producer's `time.time()`."""

AFFINITY_HEADER = "petiole-affinity"
"""Which tasks should run on one worker (`requests.affinity`)."""

TENANT_HEADER = "tenant"
"""The tenant that a task belongs to. With `PETIOLE_TENANT_WEIGHTS` it finds the tenant's queue, too."""

HELD_HEADER = "petiole-held"
"""A header of the gateway's: the name of the key, and the tokens, in and out, that limits hold for the task until
its end, and in which slot of time: `[KEY, IN, OUT, SLOT]`."""

TRACEPARENT_HEADER = "traceparent"
"""The span that the task belongs to, in the form of W3C's Trace Context (`traces`)."""

TRACESTATE_HEADER = "tracestate"
"""Beside it: what tracing systems have added."""

NAME_PROPERTY = "petiole-message"
"""A property of a delivered message: its name (`worker.broker.ledger.Taken.name`). It overwrites a producer's
value."""


INTEREST_TTL_S = 15
"""TTL of a reader's interest key. When it expires, the reader is gone."""


def image_key(handle: str) -> str:
    """String with a TTL: the file of a stored image, by its handle, which has a hash of the image's content."""
    return f"petiole:image:{handle.removeprefix(HANDLE_PREFIX)}"


def gateway_key(name: str) -> str:
    """String with a TTL: a record of the gateway's, such as what was asked (`gateway.core.record`). `name`: its
    id."""
    return f"petiole:gateway:{name}"


_BATCHES = "petiole:batches:{all}"
OPEN_BATCHES_KEY = f"{_BATCHES}:open"
"""Set: the batches that a runner has to work on (`submission.batches.durable.records`)."""


def batch_key(name: str) -> str:
    """Hash: a batch. The braces of all these keys are the same, because scripts take several of them."""
    return f"{_BATCHES}:batch:{name}"


def batch_lease_key(name: str) -> str:
    """String with a TTL: which runner has the batch."""
    return f"{_BATCHES}:lease:{name}"


def batches_key(tenant: str) -> str:
    """Sorted set: a tenant's batches, by when they were made."""
    return f"{_BATCHES}:of:{tenant}"


RUNNING_BATCHES_KEY = f"{_BATCHES}:running"
"""Set with a TTL: batches whose rows are on their way (`submission.batches.durable.fair_share`)."""


def running_batch_key(name: str) -> str:
    """String with a TTL: where the rows of such a batch go, and how fast."""
    return f"{_BATCHES}:running:{name}"


def usage_keys(day: str) -> tuple[str, str]:
    """`day`: such as 2026-11-26."""
    return f"{USAGE_KEY}:{day}", f"{USAGE_KEY}:{day}:totals"


def account_keys(tenant: str, key: str = "") -> tuple[str, str]:
    """The keys of the limits of a tenant, or of one of its API keys (`gateway.serving.auth.rate_limits`): a hash,
    what was used in the last minute; a sorted set, the tasks that run, by the time at which they are given up."""
    name = f"{tenant}/{key}" if key else tenant
    return gateway_key(f"/used/{name}"), gateway_key(f"/running/{name}")


def budgets_key() -> str:
    """String with a short TTL: what tenants have used of their budgets, as JSON (`fleet.usage.BudgetShare`)."""
    return gateway_key("/budgets")


def watched_key() -> str:
    """Sorted set: responses whose end a webhook is told (`gateway.serving.webhooks.queue`)."""
    return gateway_key("/watched")


class StreamKeys(NamedTuple):
    """The keys of one task. The braces put all of them into one hash slot of a Redis Cluster."""

    log: str
    """List: every delta, as JSON."""
    channel: str
    """Pub/sub: the same deltas."""
    state: str
    """Hash, which workers write: attempt, deaths, retries, model, adapter, prepared, running, done, retired,
    `begun:ATTEMPT` and `message:NAME` (`begin.lua`)."""
    asked: str
    """Hash, which producers write: submitted, cancel."""
    interest: str
    """String with a short TTL: a reader exists (see `cancel_on_disconnect`)."""
    completion: str
    """String: "claimed" with a short TTL, or "done" (`worker.completion.claims`)."""
    completer: str
    """String with the TTL of "claimed": which completion has claimed the task."""
    sent: str
    """Set in the broker: the messages that followed the end of the task (`worker.once`)."""
    runs: str
    """String: how many runs of a task of the application's own have begun and not ended (`foreign_tasks`)."""
    messages: str
    """Set: the names of messages of which a run has begun (`foreign_tasks`)."""

    @property
    def of_begin(self) -> tuple[str, str, str, str]:
        """The keys of one task that `begin.lua` takes, in its order."""
        return self.log, self.state, self.completion, self.asked


def stream_keys(task_id: str) -> StreamKeys:
    names = ("log", "ch", "state", "asked", "interest", "completion", "completer", "sent", "runs", "runs:messages")
    return StreamKeys(*(f"petiole:{{{task_id}}}:{name}" for name in names))


class LedgerKeys(NamedTuple):
    """The ledger's keys in the broker, under its global key prefix. An owner's name follows `lease`,
    `unacked`, `present` and `server`."""

    owners: str
    """Set of owners that hold, or have held, messages."""
    lease: str
    """String with a TTL: the lease is lost when it expires, by the server's clock. Its value says when the owner
    last showed a sign of life, in ms."""
    unacked: str
    """Hash: tag -> queue and message, byte for byte as the producer sent it."""
    home: str
    """String with a TTL: the owner that took the last message of a queue with an affinity. Queue and affinity
    follow the prefix (`take.lua`)."""
    present: str
    """Channel, to which the owner subscribes while its process lives (`worker.broker.presence`). All databases of
    a server share its channels, so the name has the database."""

    server: str
    """String with a TTL: the id of the run of the server on which the owner was present."""

    @classmethod
    def under(cls, prefix: str, db: int = 0) -> LedgerKeys:
        names = ("owners", "lease:", "unacked:", "home:", f"present:{db}:", "server:")
        return cls(*(f"{prefix}petiole:{name}" for name in names))


_OWN = ".model."


def own_queue(queue: str, name: str) -> str:
    """Beside this queue the one of the workers whose model has this name first."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)[-48:]
    digest = "" if plain == name else f"-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}"
    return f"{queue}{_OWN}{plain}{digest}"


def is_own(queue: str) -> bool:
    """Whether it is the queue of a model alone."""
    return _OWN in queue


def is_beside(queue: str, common: str) -> bool:
    """Whether it is the queue of a model beside this one."""
    return queue.startswith(f"{common}{_OWN}")


def own_of(queues: Collection[str]) -> set[str]:
    """The queues of a worker that are its model's alone."""
    return {queue for queue in queues if queue.rpartition(_OWN)[0] in queues}


def renamed(queue: str, name: str) -> str:
    """Instead of the queue of a model alone the one for another name."""
    return own_queue(queue.rpartition(_OWN)[0], name)


QUEUE_TYPE, EXCHANGE_TYPE = "quorum", "topic"
"""Of queues and exchanges on RabbitMQ."""
