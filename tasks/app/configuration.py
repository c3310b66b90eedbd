"""Petiole's settings as Celery's configuration, the same for producers and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import VERSION as CELERY
from celery.app.backends import by_url
from celery.exceptions import ImproperlyConfigured

from petiole import _lazy
from petiole.contract.settings.urls import EMBEDDED, RABBITMQ, SENTINEL, SentinelUrl, scheme, verified
from petiole.tasks.app import worker_side
from petiole.tasks.servers.sentinels import options_for
from petiole.tasks.settings import Settings, invalid, settings
from petiole.tasks.wire.headers import TENANT
from petiole.tasks.wire.keys import EXCHANGE_TYPE, QUEUE_TYPE

if TYPE_CHECKING:
    from petiole.tasks.servers import embedded
else:
    embedded = _lazy.module("petiole.tasks.servers.embedded")

RABBITMQ_SINCE = (5, 5, 3)
"""Before 5.5 Celery has no quorum queues, and no delayed delivery that works with them."""


# Callers retry for about 3 s: long enough for a restart of Redis, without blocking a web app for Celery's 20 s.
# Workers keep Celery's defaults.
PUBLISH_RETRY_POLICY = {"max_retries": 6, "interval_start": 0, "interval_step": 0.2, "interval_max": 1.0}
# This many callers connect at once. With Celery's ten, callers of an unreachable broker would wait in turns.
CALLERS_AT_ONCE = 64


def of_this_process(loader: Any) -> dict[str, Any]:
    """Celery's configuration, from the environment. Raises `InvalidSettings`."""
    config = configuration(settings())
    try:
        by_url(config["result_backend"], loader)
    except (ImproperlyConfigured, ImportError) as error:
        url = settings().results_url
        raise invalid("result_backend", f"must be one that Celery can use here ({error})", url) from None
    return config


def configuration(settings: Settings) -> dict[str, Any]:
    """Celery's configuration, the same for producers and workers.

    Messages are acknowledged late, after the result is stored, and rejected when a worker is lost.
    A prefetch multiplier of 1 keeps a worker from reserving tasks that an idle worker could run.
    """
    config: dict[str, Any] = {
        "broker_url": celery_url(settings.broker_url),
        "result_backend": celery_url(settings.results_url),
        "broker_transport_options": options_for(settings, settings.broker_url),
        "broker_pool_limit": CALLERS_AT_ONCE,
        "result_backend_thread_safe": True,  # one for all threads; see `tasks.app.backend`
        "result_backend_transport_options": {
            "retry_policy": PUBLISH_RETRY_POLICY,
            **options_for(settings, settings.results_url),
        },
        "task_publish_retry_policy": PUBLISH_RETRY_POLICY,
        "result_expires": settings.result_expires_s,
        "task_default_queue": settings.queue,
        "control_exchange": settings.control_exchange,
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_track_started": False,  # the pool stores STARTED when the engine admits the request
        "task_store_errors_even_if_ignored": True,
        "worker_pool": worker_side.POOL,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
    }
    if scheme(settings.broker_url) in RABBITMQ:
        if CELERY[:3] < RABBITMQ_SINCE:
            needed, have = (".".join(map(str, version)) for version in (RABBITMQ_SINCE, CELERY[:3]))
            limit = f"RabbitMQ needs Celery {needed} or later, and this is {have}"
            raise invalid("broker_url", limit, settings.broker_url)
        config["broker_transport_options"]["confirm_publish"] = True  # else a lost connection loses messages
        config |= {"task_default_queue_type": QUEUE_TYPE, "task_default_exchange_type": EXCHANGE_TYPE}
    if settings.weights:
        config["task_routes"] = [tenant_route(settings)]
    return config


def tenant_route(settings: Settings) -> Callable[..., dict[str, str] | None]:
    """A router: a task with the header `tenant` goes to that tenant's queue, if `tenant_weights` names it."""
    queues = {tenant: f"{settings.queue}.{tenant}" for tenant in settings.weights}

    def route(
        name: str, args: object, kwargs: object, options: dict[str, Any], **_: object
    ) -> dict[str, str] | None:
        tenant = TENANT.of(options.get("headers") or {})
        return {"queue": queues[tenant]} if tenant in queues else None

    return route


def celery_url(url: str) -> str:
    """`url` in Celery's form. `embedded://` starts the server if needed and becomes the URL of its socket."""
    if scheme(url) == SENTINEL:
        return str(SentinelUrl.parse(url))
    if scheme(url) == EMBEDDED:
        return f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    if scheme(url) == "unix":
        return url.replace("unix://", "redis+socket://", 1).replace("db=", "virtual_host=")
    return verified(url)
