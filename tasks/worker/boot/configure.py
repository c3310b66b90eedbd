"""Makes a Celery worker Petiole's: `celery -A tasks worker` calls `configure`, in the worker process only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from petiole.contract.settings.engine import BATCHING
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.app import worker_side
from petiole.tasks.app.amqp import ConnectionPools
from petiole.tasks.settings import settings
from petiole.tasks.worker import idempotency
from petiole.tasks.worker.boot import log_redaction, patches, program
from petiole.tasks.worker.boot.bootstep import EngineStep
from petiole.tasks.worker.broker import corruption
from petiole.tasks.worker.broker.fairness import tenant_queues
from petiole.tasks.worker.broker.quarantine import put_aside
from petiole.tasks.worker.completion.backend import BACKENDS
from petiole.tasks.worker.pool import commands
from petiole.tasks.worker.pool.pool import LOOK_AHEAD, Undecided

ETA_TASKS = 10_000
"""Limit on held tasks with an `eta`: each raises the prefetch by one and uses about 9 KB."""

CONFIRM_S = 10.0
"""How long RabbitMQ may take to confirm a message that a worker sends."""

STORE_RETRIES = 40
"""How often Celery tries again to store a result. With its pauses of up to 10 s, that takes about five minutes."""


def configure(app: Any) -> None:
    """Configure `app` to run Petiole's worker."""
    conf = app.conf
    if not conf.worker_concurrency:
        places = settings().max_num_seqs or BATCHING["cpu"].max_num_seqs
        conf.worker_concurrency = Undecided(places + LOOK_AHEAD)
    if not conf.worker_eta_task_limit:
        conf.worker_eta_task_limit = ETA_TASKS
    if settings().weights and not conf.task_queues:  # -Q can still select some of them
        names = tenant_queues(conf.task_default_queue, settings().weights)
        conf.task_queues = {name: {"exchange": name, "routing_key": name} for name in names}
    conf.broker_connection_max_retries = None
    conf.worker_cancel_long_running_tasks_on_connection_loss = False
    conf.worker_enable_prefetch_count_reduction = False
    conf.result_backend_always_retry = True
    if conf.result_backend_max_retries == float("inf"):  # a result that is too large would be retried for ever
        conf.result_backend_max_retries = STORE_RETRIES
    conf.worker_consumer = worker_side.CONSUMER
    app.amqp.Connection = program.Connection
    confirm_s = CONFIRM_S if scheme(conf.broker_url) in RABBITMQ else None
    if confirm_s:  # otherwise what is sent on a broken connection is lost without a word
        app.pools = ConnectionPools(app, transport_options={"confirm_publish": True})
    app.amqp.send_task_message = idempotency.sending(app.amqp.send_task_message, confirm_s)
    app.loader.override_backends = BACKENDS
    app.steps["worker"].add(EngineStep)
    log_redaction.install()
    add_route(app, settings().linked_queue)
    patches.install()
    commands.install(app)
    corruption.quarantine = put_aside


Route = Callable[..., dict[str, str] | None]


def route_to(queue: str, app: Celery) -> Route:
    """A router for the next link of a chain, a callback or a chord's body that `app` lacks. Such a task must be
    another app's: in Petiole's queue it would be lost. Producers need not import all tasks, so nothing changes for
    them. Celery asks routers only if no queue is named."""

    def route(
        name: str, args: object, kwargs: object, options: dict[str, Any], **_: object
    ) -> dict[str, str] | None:
        named = options.keys() & {"queue", "exchange", "routing_key"}
        return None if named or name in app.tasks else {"queue": queue}

    return route


def add_route(app: Celery, queue: str) -> None:
    """Add the router, after the routes that a user has set."""
    routes = app.conf.task_routes or []
    app.conf.task_routes = [*(routes if isinstance(routes, list | tuple) else [routes]), route_to(queue, app)]
