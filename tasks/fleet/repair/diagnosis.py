"""What is wrong with a fleet: `petiole doctor`.

`gather` asks Redis, the broker and the workers' reports. `diagnose` is a pure function of the answers. A finding
has the name of the alert that Prometheus raises for the same fault, if there is one. docs/runbooks.md has a
section for each name. A finding is a problem, which somebody has to mend, or a remark."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import redis
from kombu.exceptions import OperationalError

from petiole.contract.settings.urls import SENTINEL, scheme
from petiole.tasks.fleet import queues, reports, restarts, usage
from petiole.tasks.fleet.queues import QueueReport
from petiole.tasks.fleet.repair import gateways, probes
from petiole.tasks.fleet.repair.gateways import Gateway
from petiole.tasks.fleet.repair.probes import Answers
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.fleet.restarts import Life
from petiole.tasks.fleet.usage import BudgetShare
from petiole.tasks.servers import connections
from petiole.tasks.servers.failover import refuses_writes
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import QUARANTINE_KEY

SLOW_S = 0.1
"""Above this a round trip to Redis is slow."""
CLOCK_S = 5.0
"""Above this the clocks of Redis and of this process differ."""
LEASE_S = 10.0
LOW_MEMORY_BYTES = 256 * 2**20
LOW_DISK = 0.05
"""Below this free share a disk is nearly full."""
RECENT_S = 600.0
"""A failed process whose successor began within this time is a finding."""
FULL = 0.9
"""The share of `maxmemory` from which on Redis is nearly full."""
DENIED_SHOWN = 5
"""Of the commands that a gateway's user may not call."""
NOBODY = "no worker of Petiole has taken for days: it is misspelt, or another application's"

_ERRORS = (OperationalError, redis.RedisError, OSError)


PASSING = {"draining", "reloading"}
"""States of a worker that end by themselves."""


class Finding(NamedTuple):
    """`name`: an alert's, or one of this module's own. A remark needs no hand: a limit does what somebody has set
    it for, a failover has passed, an upgrade is not complete."""

    name: str
    what: str
    grade: Literal["problem", "remark"] = "problem"


@dataclass(frozen=True)
class Server:
    """A Redis. `info`: of `INFO`, None if this user may not ask. `watched`: by sentinels."""

    name: str
    answers: Answers
    info: Mapping[str, Any] | None = None
    watched: bool = False

    @property
    def takes_writes(self) -> bool:
        return not self.answers.refusal


@dataclass(frozen=True)
class Facts:
    """`unreachable`: the errors of servers that do not answer, by name."""

    servers: Sequence[Server] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    workers: Sequence[WorkerReport] = ()
    lives: Mapping[str, Life] = field(default_factory=dict)
    queues: Sequence[QueueReport] = ()
    quarantined: int = 0
    budgets: Sequence[BudgetShare] = ()
    gateways: Sequence[Gateway] = ()
    now: float = 0.0


def gather(urls_of_gateways: Iterable[str] = ()) -> Facts:
    """The facts of the fleet whose settings this process has. Takes some round trips for each server."""
    urls = {"streams": settings().streams_url, **probes.urls()}
    if urls.get("broker") == urls["streams"]:
        del urls["broker"]
    asked = list(gateways.look(urls_of_gateways))
    servers, unreachable = [], {}
    for name, url in urls.items():
        try:
            servers.append(_server(name, url))
        except _ERRORS as error:
            unreachable[name] = str(error)
    if "streams" in unreachable:
        return Facts(servers, unreachable, gateways=asked)
    workers, counted = reports.workers(), list[QueueReport]()
    try:
        counted = queues.report_queues(workers)
    except _ERRORS as error:
        if not refuses_writes(error):  # kombu begins with a PING, which a Redis that cannot save refuses, too
            unreachable["broker"] = str(error)
    quarantined, used = int(connections.streams().llen(QUARANTINE_KEY)), usage.budgets()
    lives = restarts.lives()
    return Facts(servers, unreachable, workers, lives, counted, quarantined, used, asked, time.time())


def _server(name: str, url: str) -> Server:
    with connections.connect(url) as client:
        answers = probes.ask(client)
        try:
            info = client.info()
        except redis.exceptions.NoPermissionError:
            info = None
    return Server(name, answers, info, scheme(url) == SENTINEL)


def diagnose(facts: Facts) -> list[Finding]:
    """What is wrong, the cause of other findings first, and remarks last."""
    found = [
        Finding(
            "PetioleRedisDown",
            f"the {'Redis of the streams' if name == 'streams' else name} does not answer: {why}",
        )
        for name, why in facts.unreachable.items()
    ]
    for server in facts.servers:
        found += _of_server(server)
    live = [worker for worker in facts.workers if not worker.lost]
    found += _of_changes(live)
    if all(server.takes_writes for server in facts.servers):  # or no worker can report
        found += _of_queues(facts.queues, live)
        for worker in facts.workers:
            found += _of_worker(worker)
    found += _of_starts(facts)
    found += _of_versions(live)
    for gateway in facts.gateways:
        found += _of_gateway(gateway)
    for share in facts.budgets:
        if share.used >= share.most:
            said = f"tenant {share.tenant!r} has used {share.used} of its {share.budget} of {share.most}"
            found.append(Finding("PetioleBudgetUsedUp", said, "remark"))
    if facts.quarantined:
        were = "message was" if facts.quarantined == 1 else "messages were"
        found.append(Finding("PetioleQuarantine", f"{facts.quarantined} malformed {were} put aside"))
    return sorted(found, key=lambda finding: finding.grade == "remark")


def _of_server(server: Server) -> Iterator[Finding]:
    name, info = f"the Redis of the {server.name}", server.info or {}
    if not server.takes_writes:
        yield Finding("PetioleRedisReadOnly", f"{name} takes no writes: {server.answers.refusal}")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        yield Finding("RedisEvicts", f"{name} may evict tasks: maxmemory-policy must be noeviction, got {policy}")
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if most and used > FULL * most:
        yield Finding("RedisNearlyFull", f"{name} uses {used / most:.0%} of its maxmemory of {most} bytes")
    for what in ("aof_last_write_status", "rdb_last_bgsave_status"):
        if info.get(what, "ok") != "ok":
            yield Finding("RedisDiskFails", f"{name} cannot write to its disk: {what} is {info[what]}")
    if "aof_enabled" in info and not info["aof_enabled"]:
        yield Finding("RedisForgets", f"{name} loses tasks of the last minutes when it ends: set appendonly yes")
    if server.watched and info.get("connected_slaves", 1) == 0:
        yield Finding("RedisWithoutReplica", f"{name} has no replica: its next failure loses all that waits")
    if server.answers.round_trip_s > SLOW_S:
        yield Finding("PetioleRedisSlow", f"{name} answers after {server.answers.round_trip_s:.2f} s")
    if abs(server.answers.ahead_s) > CLOCK_S:
        differs = f"differs from this one's by {server.answers.ahead_s:.0f} s"
        yield Finding("ClocksDiffer", f"the clock of {name} {differs}")


def _of_changes(live: Iterable[WorkerReport]) -> Iterator[Finding]:
    since = [worker.redis_changed_s for worker in live if worker.redis_changed_s is not None]
    if since and (last_s := min(since)) < RECENT_S:
        said = f"another Redis answers since {last_s:.0f} s: a failover, or a restart"
        yield Finding("PetioleRedisChanged", said, "remark")


def _of_queues(counted: Iterable[QueueReport], live: Iterable[WorkerReport]) -> Iterator[Finding]:
    taken = {queue for worker in live if worker.state == "ready" for queue in worker.queues}
    for queue in counted:
        if queue.waiting and queue.queue not in taken:
            tasks = "task waits" if queue.waiting == 1 else "tasks wait"
            said = "no ready worker takes" if queue.known else NOBODY
            yield Finding("PetioleNoWorker", f"{queue.waiting} {tasks} in {queue.queue!r}, from which {said}")


def _of_gateway(gateway: Gateway) -> Iterator[Finding]:
    name = f"the gateway at {gateway.url}"
    if gateway.away:
        yield Finding("PetioleGatewayDown", f"{name} does not serve: {gateway.away}")
    if gateway.denied:
        more = len(gateway.denied) - DENIED_SHOWN
        others = f", and {more} more, which {gateway.url}/ready names" if more > 0 else ""
        denied = f"its Redis user may not do this: {', '.join(gateway.denied[:DENIED_SHOWN])}{others}"
        yield Finding("PetioleGatewayRights", f"{name} lacks rights: {denied}")


def _of_worker(worker: WorkerReport) -> Iterator[Finding]:
    name = worker.worker
    if worker.lost:
        yield Finding("PetioleWorkerLost", f"{name} has not reported for {worker.age_s:.0f} s")
        return
    if worker.state != "ready":
        said = f"{name} takes no tasks: it is {worker.state}"
        yield Finding("PetioleWorkerNotReady", said, "remark" if worker.state in PASSING else "problem")
    if worker.lease_age_s > LEASE_S:
        yield Finding("PetioleLeaseOld", f"{name} has not renewed its leases for {worker.lease_age_s:.0f} s")
    if worker.pending_completions:
        yield Finding("PetioleResultsNotStored", f"{name} cannot store {worker.pending_completions} results")
    if worker.streams_behind_s > 1:
        yield Finding(
            "PetioleStreamsLate", f"Redis takes the streams of {name} {worker.streams_behind_s:.1f} s late"
        )
    if worker.memory_left_bytes is not None and worker.memory_left_bytes < LOW_MEMORY_BYTES:
        yield Finding("PetioleMemoryLow", f"{name} has {worker.memory_left_bytes >> 20} MiB of memory left")
    for folder, free in worker.disks.items():
        if free < LOW_DISK:
            said = f"the disk of {name} that has {folder} is nearly full: {free:.1%} of it is free"
            yield Finding("PetioleDiskNearlyFull", said)


def _of_starts(facts: Facts) -> Iterator[Finding]:
    for name, life in facts.lives.items():
        if life.failed and facts.now - life.started_at < RECENT_S:
            ended = f"the process before ended: {life.last_exit}"
            yield Finding("PetioleWorkerRestarts", f"{name} has started {life.starts} times, and {ended}")


def _of_versions(workers: Iterable[WorkerReport]) -> Iterator[Finding]:
    versions, models = defaultdict[str, list[str]](list), defaultdict[str, dict[str, str]](dict)
    for worker in workers:
        versions[worker.version].append(worker.worker)
        for queue in worker.queues:
            models[queue][worker.fingerprint] = worker.model
    if len(versions) > 1:
        said = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(versions.items()))
        yield Finding("VersionsDiffer", f"workers have different versions ({said})", "remark")
    for queue, served in models.items():
        if len(served) > 1:
            said = ", ".join(sorted({*served.values()}))
            yield Finding("PetioleModelsDiffer", f"workers of queue {queue!r} have {len(served)} models: {said}")
