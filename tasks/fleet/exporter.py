"""Prometheus metrics of the fleet: `petiole metrics` exports the workers' reports and the broker's queue lengths.

`fleet.reports` declares the metrics that are one field of a report; those with further labels stand here. One
exporter serves a whole fleet, and runs anywhere that reaches its Redis. It keeps no state between scrapes.
Figures have the names that other model servers give them, where there are such names. Counters count from a
worker's start. The counters of a restarted worker begin at zero, which Prometheus handles as a counter reset."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import redis
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from petiole.tasks.fleet import queues, reports, restarts, usage
from petiole.tasks.fleet.metrics import Alias, buckets, declared
from petiole.tasks.fleet.repair import probes
from petiole.tasks.fleet.repair.probes import Answers
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.fleet.restarts import Life
from petiole.tasks.fleet.usage import TenantUsage
from petiole.tasks.servers import connections
from petiole.tasks.servers.failover import refuses_writes
from petiole.tasks.wire.keys import QUARANTINE_KEY

logger = logging.getLogger(__name__)

_LABELS = ("worker", "model")
MOST_TENANTS = 500
"""The tenants with figures of their own: those with the most tokens."""


class FleetCollector(Collector):
    """Collects all metrics at each scrape. `aliases`: some of them also under these names (`fleet.metrics`)."""

    def __init__(self, aliases: Iterable[Alias] = ()) -> None:
        self._aliases = tuple(aliases)

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("petiole_redis_up", "Whether Redis and the broker answer as they should.")
        try:
            workers, quarantined = reports.workers(), connections.streams().llen(QUARANTINE_KEY)
            answers, started = probes.answers(), restarts.lives()
            lengths, known = _lengths(workers), queues.known_queues()
        except Exception as error:  # any exception: the next scrape tries again
            logger.warning("no metrics could be collected: %s", str(error) or type(error).__name__)
            up.add_metric((), 0)
            yield up
            return
        up.add_metric((), 1)
        yield up
        yield from _servers(answers)
        yield from _lives(started)
        yield GaugeMetricFamily("petiole_quarantine_messages", "Messages that were put aside.", value=quarantined)
        yield from _queues(lengths, workers, known)
        yield from _usage()
        yield _budgets()
        yield from _states(workers)
        live = [worker for worker in workers if not worker.lost]
        yield from _figures(live)
        for alias in self._aliases:
            yield from alias(live)

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering the collector does not query Redis."""
        return ()


def _lengths(workers: Iterable[WorkerReport]) -> dict[tuple[str, int | None], int]:
    """By queue and priority; empty if the broker takes no writes: kombu begins with a PING, which a Redis that
    cannot save refuses, too."""
    try:
        return queues.queue_lengths(others=(queue for worker in workers for queue in worker.queues))
    except Exception as error:
        if refuses_writes(error):
            return {}
        raise


def _servers(answers: Mapping[str, Answers]) -> Iterator[Metric]:
    writable = GaugeMetricFamily(
        "petiole_redis_writable", "Whether this Redis takes writes: not if it is full.", labels=("redis",)
    )
    trip = GaugeMetricFamily(
        "petiole_redis_round_trip_seconds", "Seconds that a command of the exporter takes.", labels=("redis",)
    )
    for name, said in answers.items():
        trip.add_metric((name,), said.round_trip_s)
        if said.refusal is not None:
            writable.add_metric((name,), not said.refusal)
        if said.refusal:
            logger.warning("the Redis of the %s takes no writes: %s", name, said.refusal)
    yield from (writable, trip)


def _queues(
    lengths: Mapping[tuple[str, int | None], int], workers: Iterable[WorkerReport], known: Collection[str]
) -> Iterator[Metric]:
    """`known`: the fleet's queues. The workers of others are not Petiole's, or there are none."""
    waiting = GaugeMetricFamily(
        "petiole_queue_messages", "Tasks that no worker has taken.", labels=("queue", "priority")
    )
    takers = GaugeMetricFamily(
        "petiole_queue_workers", "Ready workers that take from the queue.", labels=("queue",)
    )
    models = GaugeMetricFamily(
        "petiole_queue_models", "Different models of the workers that take from the queue.", labels=("queue",)
    )
    for (queue, priority), length in lengths.items():
        waiting.add_metric((queue, "" if priority is None else str(priority)), length)
    taking, served = Counter[str](), defaultdict[str, set[str]](set)
    for worker in workers:
        for queue in () if worker.lost else worker.queues:
            taking[queue] += worker.state == "ready"
            served[queue].add(worker.fingerprint)
    for queue in dict.fromkeys(queue for queue, _ in lengths if queue in known):
        takers.add_metric((queue,), taking[queue])
        models.add_metric((queue,), len(served[queue]))
    yield from (waiting, takers, models)


def _lives(started: dict[str, Life]) -> Iterator[Metric]:
    """Metrics of all worker names of the last week, whether or not a worker has the name now."""
    starts = CounterMetricFamily("petiole_worker_starts", "Starts of workers of this name.", labels=("worker",))
    since = GaugeMetricFamily(
        "petiole_worker_start_time_seconds",
        "Unix time of the last start of a worker of this name.",
        labels=("worker",),
    )
    exits = GaugeMetricFamily(
        "petiole_worker_last_exit",
        "1; `reason` is how the previous process of this name ended.",
        labels=("worker", "reason"),
    )
    for name, life in started.items():
        starts.add_metric((name,), life.starts)
        since.add_metric((name,), life.started_at)
        if life.last_exit:
            exits.add_metric((name, life.last_exit), 1)
    yield from (starts, since, exits)


def _usage() -> Iterator[Metric]:
    """Today's sums of the ledger, which begin anew at midnight, UTC: of the busiest tenants, and of all. What the
    busiest leave of the sum of all is the others'; it is no counter, because a tenant may join the busiest. None
    if this user may not read them."""
    try:
        found = usage.usage()
    except redis.RedisError:
        return
    tasks = CounterMetricFamily(
        "petiole_usage_requests", "Tasks that have ended today, by how.", labels=("tenant", "model", "end")
    )
    tokens = CounterMetricFamily(
        "petiole_usage_tokens", "Tokens of the tasks that have ended today.", labels=("tenant", "model", "kind")
    )
    for one in usage.of_the_busiest(found, MOST_TENANTS):
        _add_usage(one, (one.tenant, one.model), tasks, tokens)
    yield from (tasks, tokens)
    tasks = CounterMetricFamily(
        "petiole_all_usage_requests",
        "Tasks of all tenants that have ended today, by how.",
        labels=("model", "end"),
    )
    tokens = CounterMetricFamily(
        "petiole_all_usage_tokens",
        "Tokens of the tasks of all tenants that have ended today.",
        labels=("model", "kind"),
    )
    for one in usage.of_all(found):
        _add_usage(one, (one.model,), tasks, tokens)
    yield from (tasks, tokens)


def _add_usage(
    one: TenantUsage, labels: tuple[str, ...], tasks: CounterMetricFamily, tokens: CounterMetricFamily
) -> None:
    for end, number in one.ends.items():
        tasks.add_metric((*labels, end), number)
    for kind, number in one.sums.items():
        if kind != "requests":
            tokens.add_metric((*labels, kind), number)


def _budgets() -> Metric:
    used = GaugeMetricFamily(
        "petiole_budget_used_ratio", "Share of a tenant's budget that is used.", labels=("tenant", "budget")
    )
    for one in usage.budgets():
        used.add_metric((one.tenant, one.budget), one.used / one.most)
    return used


def _states(workers: list[WorkerReport]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "petiole_worker_up", "Whether the worker has reported within six seconds.", labels=_LABELS
    )
    ready = GaugeMetricFamily(
        "petiole_worker_ready",
        "Whether it takes tasks: 0 while it drains, is paused, or takes from no queue.",
        labels=_LABELS,
    )
    states = GaugeMetricFamily(
        "petiole_worker_state", "1; what the worker says of itself.", labels=(*_LABELS, "state")
    )
    lease = GaugeMetricFamily(
        "petiole_lease_age_seconds", "Seconds since the leases on the worker's tasks were renewed.", labels=_LABELS
    )
    for worker in workers:
        lease.add_metric(_labels(worker), worker.lease_age_s + (worker.age_s or 0))
        up.add_metric(_labels(worker), not worker.lost)
        ready.add_metric(_labels(worker), not worker.lost and worker.state == "ready")
        if not worker.lost:
            states.add_metric((*_labels(worker), worker.state), 1)
    yield up
    yield ready
    yield states
    yield lease


def _figures(workers: list[WorkerReport]) -> Iterator[Metric]:
    """Metrics of live workers. The last report of a lost worker is out of date."""
    yield from declared(workers, "petiole_", _LABELS, _labels)
    labels = (*_LABELS, "priority")
    what = "Seconds from a task's submission until a worker takes it."
    waits = HistogramMetricFamily("petiole_broker_time_seconds", what, labels=labels)
    for worker in workers:
        for priority, distribution in worker.broker_s.items():
            waits.add_metric((*_labels(worker), priority), buckets(distribution), distribution.sum)
    yield waits
    how = ("device", "weight_format", "kernels", "instructions", "threads")
    what = "1; how the worker stores and computes its model."
    computing = GaugeMetricFamily("petiole_computing", what, labels=(*_LABELS, *how))
    for worker in workers:
        computing.add_metric((*_labels(worker), *(str(getattr(worker, name)) for name in how)), 1)
    yield computing
    disks = GaugeMetricFamily(
        "petiole_disk_free_ratio",
        "Free share of the disk that has this folder of the worker's.",
        labels=(*_LABELS, "folder"),
    )
    for worker in workers:
        for folder, free in worker.disks.items():
            disks.add_metric((*_labels(worker), folder), free)
    yield disks
    pages = GaugeMetricFamily("petiole_kv_cache_pages", "Pages of the KV cache.", labels=(*_LABELS, "state"))
    windows = GaugeMetricFamily(
        "petiole_window_kv_cache_pages",
        "Pages of the KV cache of layers with a window.",
        labels=(*_LABELS, "window", "state"),
    )
    hits = CounterMetricFamily(
        "petiole_window_lookup_tokens",
        "Prompt tokens looked up for layers with a window, by whether these could reuse them.",
        labels=(*_LABELS, "window", "found"),
    )
    ends = CounterMetricFamily(
        "petiole_requests", "Ends of generations; error: a failed task.", labels=(*_LABELS, "finish_reason")
    )
    failures = CounterMetricFamily(
        "petiole_failures", "Failed tasks, by whose fault it is: caller or server.", labels=(*_LABELS, "fault")
    )
    for worker in workers:
        for state in ("used", "cached", "free"):
            pages.add_metric((*_labels(worker), state), getattr(worker, f"pages_{state}"))
        for window, figures in worker.windows.items():
            for state in ("held", "cached", "free"):
                windows.add_metric((*_labels(worker), window, state), figures.get(f"pages_{state}", 0))
            for found in ("hit", "missed"):
                hits.add_metric((*_labels(worker), window, found), figures.get(f"{found}_tokens", 0))
        for reason, count in worker.finished.items():
            ends.add_metric((*_labels(worker), reason), count)
        for fault in ("caller", "server"):
            failures.add_metric((*_labels(worker), fault), worker.failed.get(fault, 0))
    yield pages
    yield windows
    yield hits
    yield ends
    yield failures
    yield from _recurrent([worker for worker in workers if worker.states])


def _recurrent(workers: list[WorkerReport]) -> Iterator[Metric]:
    """Metrics of layers that keep a state, of workers whose model has some."""
    states = GaugeMetricFamily(
        "petiole_recurrent_states", "States of layers that keep one, a sequence each.", labels=(*_LABELS, "state")
    )
    snapshots = GaugeMetricFamily(
        "petiole_state_snapshots", "Copies of states, from which prompts go on.", labels=(*_LABELS, "state")
    )
    changes = CounterMetricFamily(
        "petiole_state_snapshot_changes",
        "Copies of states that were made or evicted.",
        labels=(*_LABELS, "change"),
    )
    hits = CounterMetricFamily(
        "petiole_state_lookup_tokens",
        "Prompt tokens looked up for layers that keep a state, by whether these could go on behind them.",
        labels=(*_LABELS, "found"),
    )
    for worker in workers:
        labels, figures = _labels(worker), worker.states
        held, free = figures.get("states_held", 0), figures.get("snapshots_free", 0)
        states.add_metric((*labels, "held"), held)
        states.add_metric((*labels, "free"), figures.get("states_total", 0) - held)
        snapshots.add_metric((*labels, "cached"), figures.get("snapshots_total", 0) - free)
        snapshots.add_metric((*labels, "free"), free)
        for change in ("made", "evicted"):
            changes.add_metric((*labels, change), figures.get(f"snapshots_{change}", 0))
        for found in ("hit", "missed"):
            hits.add_metric((*labels, found), figures.get(f"state_{found}_tokens", 0))
    yield from (states, snapshots, changes, hits)


def _labels(worker: WorkerReport) -> tuple[str, str]:
    return worker.worker, worker.model


def serve(host: str, port: int, aliases: Iterable[Alias] = ()) -> int:
    """Serve scrapes on a background thread. Returns the port, which is a free one if `port` is 0."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(aliases))
    server, _ = start_http_server(port, host, registry)
    return int(server.server_port)
