"""Petiole's bootstep in Celery's worker: starts lease renewal, the reports for the fleet view and the
heartbeat file.

Celery starts steps in the order of their dependencies, and stops them in reverse:

    event loop, pool (loads the model), this step, consumer
"""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from celery import bootsteps
from celery.exceptions import WorkerShutdown
from celery.worker import state

from petiole.contract.requests.count import SUFFIX
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.fleet import restarts
from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.fleet.reports import WorkerReport, version
from petiole.tasks.fleet.restarts import Life
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import own_of, own_queue, renamed
from petiole.tasks.worker.boot.batch_runners import BatchHost
from petiole.tasks.worker.broker import transport
from petiole.tasks.worker.broker.leases import LeaseKeeper
from petiole.tasks.worker.generation.counting import CountingThreads
from petiole.tasks.worker.pool.pool import EX_USAGE, EnginePool, Undecided
from petiole.tasks.worker.reports import heartbeat
from petiole.tasks.worker.reports.card import find as find_card
from petiole.tasks.worker.reports.disks import Disks, folders_of
from petiole.tasks.worker.reports.facts import facts_of, model_name
from petiole.tasks.worker.reports.host import ProcessMemory, say_if_clocks_differ
from petiole.tasks.worker.reports.incidents import incidents
from petiole.tasks.worker.reports.marker import Marker
from petiole.tasks.worker.reports.reporter import GrowthRate, Reporter, engine_figures

logger = logging.getLogger(__name__)

YOUNG_OBJECTS = 10_000
"""Garbage collection threshold of generation 0: with a default of 700 it would run every few tasks."""


class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """The step between pool and consumer."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        record_life(worker)
        if path := settings().heartbeat_file:
            try:
                heartbeat.clear(Path(path))
            except OSError as error:
                logger.critical(
                    "PETIOLE_HEARTBEAT_FILE: must be a file that can be written (%s), got %s", error, path
                )
                raise WorkerShutdown(EX_USAGE) from None

    def start(self, worker: Any) -> None:
        """Runs when the model is loaded and no message has been taken.

        The step has no `stop`: leases are needed until the consumer's channel has given its messages back, and
        reports until the pool has handed off.
        """
        pool = worker.pool
        if not isinstance(pool, EnginePool):
            named = type(pool).__module__
            logger.critical("Petiole's tasks need its own pool, not %s: leave -P (--pool) out", named)
            raise WorkerShutdown(EX_USAGE)
        if isinstance(worker.concurrency, Undecided):
            worker.concurrency = pool.limit
            if not worker.autoscale:
                worker.consumer.initial_prefetch_count = pool.limit * worker.prefetch_multiplier
        freeze()
        serving = pool.serving
        assert serving is not None, "the pool starts first"
        services, engine = serving.services, serving.services.engine
        leases = LeaseKeeper(
            ledgers=lambda: [channel.ledger for channel in list(transport.channels)],
            connect=connect,
            heartbeat_age_s=engine.heartbeat_age_s,
            visibility_timeout_s=settings().visibility_timeout_s,
        )
        leases.start()
        say_if_clocks_differ(connections.streams())
        card = find_card(str(engine.stats().get("device", "")))
        at_start, on_rabbitmq, memory = version(), scheme(settings().broker_url) in RABBITMQ, ProcessMemory()

        marker = Marker(worker.app)

        begun_with = engine.limits.fingerprint

        add_own_queues(worker.app, model_name(settings(), engine.limits.model))

        def queues() -> list[str]:
            return sorted({*serving.steering.given_up, *worker.app.amqp.queues.consume_from})

        def takes() -> bool:
            return serving.state == "ready" and bool(queues())

        if path := settings().heartbeat_file:
            heartbeat.Heartbeat(Path(path), engine.heartbeat_age_s, takes).start()

        def facts() -> ModelFacts:
            limits, served = engine.limits, queues()
            own, name = own_of(served), model_name(settings(), limits.model)
            return facts_of(
                settings(),
                engine.facts(),
                model=limits.model,
                fingerprint=limits.fingerprint,
                reloaded=limits.fingerprint != begun_with,
                queues=set(served) - own,
                own_queues=(queue for queue in own if renamed(queue, name) == queue),
                worker=worker.hostname,
                version=at_start,
                loaded_adapters=services.adapters.names(),
            )

        tokens = GrowthRate(lambda: int(engine.stats().get("generated_tokens", 0)))
        texts = GrowthRate(lambda: int(engine.stats().get("texts", 0)))

        batches, disks = BatchHost(worker.hostname, settings().visibility_timeout_s), Disks(folders_of(settings()))

        def report() -> WorkerReport:
            served = queues()
            return WorkerReport(
                worker=worker.hostname,
                state="silenced" if serving.state == "ready" and not served else serving.state,
                fingerprint=engine.limits.fingerprint,
                version=at_start,
                queues=served,
                result_marker=marker.name,
                tokens_per_s=tokens(),
                texts_per_s=texts(),
                lease_age_s=round(engine.heartbeat_age_s() if on_rabbitmq else leases.lease_age_s, 1),
                streams_behind_s=round(services.publisher.behind_s, 3),
                held_messages=held_messages(),
                **pool.uncompleted(),
                **incidents.report(),
                **batches.report(),
                **memory.report(),
                **disks.report(),
                **({} if card is None else card.report()),
                **engine_figures(engine.stats()),
                **services.tally.report(),
            )

        disks.start()
        pool.reporter = Reporter(
            connections.streams(),
            worker=worker.hostname,
            report=report,
            facts=facts,
            marker=marker,
        )
        pool.reporter.start()
        tenants = {f"{settings().queue}.{tenant}" for tenant in settings().weights}
        pool.counters = CountingThreads(worker.app, worker.hostname)
        pool.counters.take(set(queues()) - tenants)
        batches.start()
        pool.say_that_it_serves()


def add_own_queues(app: Any, model: str) -> None:
    """Beside each queue that this worker takes from, the queue of its model alone. `model`: its first name."""
    queues, apart = app.amqp.queues, {f"{settings().queue}.{tenant}" for tenant in settings().weights}
    common = set(queues.consume_from) - apart - {settings().linked_queue}
    own = {own_queue(queue, model) for queue in common if not queue.endswith(SUFFIX)}
    for queue in own:
        queues.select_add(queues.new_missing(queue))


def held_messages() -> int:
    """How many messages this worker has taken and not acknowledged. On RabbitMQ, which has no channel of
    Petiole's: how many requests Celery has in hand."""
    channels = list(transport.channels)
    return sum(channel.qos.count for channel in channels) if channels else len(state.reserved_requests)


def record_life(worker: Any) -> None:
    """Record that the worker starts, and its exit status when its process exits. Say how the process before this
    one ended, if it failed."""

    def record(write: Callable[..., Life | None], *more: str) -> Life | None:
        try:
            return write(connections.streams(), worker.hostname, *more)
        except (*connections.LOST, redis.RedisError):
            logger.debug("starts and exits are not recorded", exc_info=True)
        return None

    life = record(restarts.begin)
    if life is not None and life.failed:
        logger.warning(
            "start %d of %s: the previous process ended: %s", life.starts, worker.hostname, life.last_exit
        )
    atexit.register(lambda: record(restarts.end, str(worker.exitcode or 0)))


def freeze() -> None:
    """Exclude all present objects from garbage collection: a full one would pause all streams for 100 ms.

    Later objects live as long as a task, and few are in cycles, so they are collected less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def connect() -> redis.Redis | None:
    """A separate client for the lease keeper, to the consumer's broker. None until the consumer has registered."""
    timeout_s = max(1.0, settings().visibility_timeout_s / 5)
    for channel in list(transport.channels):
        if channel.ledger.registered:
            return channel.own_client(timeout_s)
    return None
