"""The Celery application: one object, configured from the environment at its first use.

Producers and workers share it. Only a worker process calls `tasks.worker.configure`, which installs the transport
and the worker's other extensions. A producer never imports that package: the pool is configured by dotted name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from importlib import import_module
from typing import Any

from celery import Celery, _state
from celery.app.backends import by_url
from celery.app.utils import Settings as StockConfiguration
from celery.exceptions import ImproperlyConfigured
from celery.signals import celeryd_after_setup, celeryd_init
from kombu import pools

from tasks.rabbitmq import EXCHANGE_TYPE, QUEUE_TYPE, Amqp, whole_second
from tasks.sentinels import SCHEME as SENTINEL
from tasks.sentinels import SentinelUrl
from tasks.settings import EMBEDDED, RABBITMQ, Settings, invalid, misspelt, scheme, settings, verified

logger = logging.getLogger(__name__)

NOT_HEEDED = {
    "CELERY_BROKER_URL": "PETIOLE_BROKER_URL",  # also what `celery -b` and BROKER_URL become
    "CELERY_BROKER_READ_URL": "PETIOLE_BROKER_URL",
    "CELERY_BROKER_WRITE_URL": "PETIOLE_BROKER_URL",
    "CELERY_RESULT_BACKEND": "PETIOLE_RESULT_BACKEND",
}
POOL = "tasks.worker.pool:EnginePool"

# Callers retry for about 3 s: long enough for a restart of Redis, without blocking a web app for Celery's 20 s.
# Workers keep Celery's defaults.
CALLERS_PATIENCE = {"max_retries": 6, "interval_start": 0, "interval_step": 0.2, "interval_max": 1.0}
# As many of a process connect to the broker at once; Celery's ten would wait for an unreachable one in turns.
CALLERS_AT_ONCE = 64
BACKENDS = {
    "redis": "tasks.backend:RedisBackend",
    "rediss": "tasks.backend:RedisBackend",
    SENTINEL: "tasks.backend:SentinelBackend",
}


def configuration(settings: Settings) -> dict[str, Any]:
    """Celery's configuration, the same for producers and workers.

    Messages are acknowledged late, after the result is stored, and rejected when a worker is lost.
    A prefetch multiplier of 1 keeps a worker from reserving tasks that an idle worker could run.
    """
    config: dict[str, Any] = {
        "broker_url": celery_url(settings.broker_url),
        "result_backend": celery_url(settings.results_url),
        "broker_transport_options": settings.sentinel_options(settings.broker_url),
        "broker_pool_limit": CALLERS_AT_ONCE,
        "result_backend_thread_safe": True,  # one for all threads; see `tasks.backend`
        "result_backend_transport_options": {
            "retry_policy": CALLERS_PATIENCE,
            **settings.sentinel_options(settings.results_url),
        },
        "task_publish_retry_policy": CALLERS_PATIENCE,
        "result_expires": settings.result_expires_s,
        "task_default_queue": settings.queue,
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_track_started": False,  # the pool stores STARTED when the engine admits the request
        "task_store_errors_even_if_ignored": True,
        "worker_pool": POOL,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
    }
    if scheme(settings.broker_url) in RABBITMQ:
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
        tenant = (options.get("headers") or {}).get("tenant")
        return {"queue": queues[tenant]} if isinstance(tenant, str) and tenant in queues else None

    return route


def celery_url(url: str) -> str:
    """`url` in Celery's form. `embedded://` starts the server if needed and becomes the URL of its socket."""
    if scheme(url) == SENTINEL:
        return str(SentinelUrl.parse(url))
    if scheme(url) == EMBEDDED:
        from tasks import embedded

        return f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    if scheme(url) == "unix":
        return url.replace("unix://", "redis+socket://", 1).replace("db=", "virtual_host=")
    return verified(url)


class Configuration(StockConfiguration):  # type: ignore[misc]
    """Celery's settings, but `CELERY_BROKER_URL` and the like are ignored: they may be meant for other apps."""

    @property
    def broker_url(self) -> Any:
        return self.first("broker_url")

    @property
    def broker_read_url(self) -> Any:
        return self.get("broker_read_url") or self.broker_url

    @property
    def broker_write_url(self) -> Any:
        return self.get("broker_write_url") or self.broker_url

    @property
    def result_backend(self) -> Any:
        return self.first("result_backend")


class App(Celery):  # type: ignore[misc]
    """Celery shows other threads a configuration before its defaults are set, so that of two concurrent first
    submissions one could use the default broker URL. Here other threads see only the complete configuration.

    Celery's pools of connections hear of no forks but billiard's. A web server that loads the app and then forks
    its workers (`gunicorn --preload`, uWSGI) would have them share RabbitMQ's connections, and mix their messages.
    """

    _conf: Any  # Celery's
    _pending_defaults: Any
    configured: bool
    _complete = False
    amqp_cls = Amqp
    control_cls = "tasks.control:Control"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._configuring = threading.RLock()
        self._process = os.getpid()
        self._inherited: list[Any] = []
        super().__init__(*args, **options)
        object.__setattr__(self._conf, "__class__", Configuration)  # a plain assignment would be a setting

    @property
    def conf(self) -> Any:
        if self._complete:
            return Celery.conf.fget(self)
        with self._configuring:
            return Celery.conf.fget(self)

    def _load_config(self) -> Any:
        with self._configuring:
            published, defaults = self._conf, self._pending_defaults.copy()
            if self.configured and published is not None:  # loaded by another thread
                return published
            self._conf = None
            try:
                loaded = super()._load_config()
            except BaseException:  # reset, so that the next access raises again
                self._conf, self.configured, self._pending_defaults = published, False, defaults
                raise
            if published is not None:
                published.swap_with(loaded)
            self._conf, self._complete = published or loaded, True
            return self._conf

    @property
    def pool(self) -> Any:
        self._leave_to_parent()
        return Celery.pool.fget(self)

    @property
    def producer_pool(self) -> Any:
        self._leave_to_parent()
        return Celery.producer_pool.fget(self)

    def _leave_to_parent(self) -> None:
        """In a forked child, make new pools. The inherited ones are kept: when amqp's connections are collected,
        they close the parent's, too."""
        if self._process != os.getpid():
            self._inherited += [self._pool, self.amqp._producer_pool]
            for group in (pools.producers, pools.connections):
                with contextlib.suppress(KeyError):
                    del group[self.connection_for_write()]
            self._after_fork()
            self._process = os.getpid()

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        if scheme(self.conf.broker_url) in RABBITMQ:
            countdown, eta = whole_second(countdown, eta, self.now())
        return super().send_task(name, args, kwargs, countdown, eta, *more, **options)

    @cached_property
    def Worker(self) -> Any:  # noqa: N802 - Celery's name
        return self.subclass_with_self("tasks.worker.program:Worker")


def make_app() -> Celery:
    """A Celery app that reads its settings, and starts an embedded Redis, at its first use.

    If the process already has a Celery app, that one stays the current app.
    """
    first = _state.default_app is None and _state._tls.current_app is None
    app = App("petiole", include=["tasks.definitions"], set_as_current=first)
    app.loader.override_backends = BACKENDS

    def configure() -> dict[str, Any]:
        config = configuration(settings())
        try:
            by_url(config["result_backend"], app.loader)
        except (ImproperlyConfigured, ImportError) as error:
            url = settings().results_url
            raise invalid("result_backend", f"must be one that Celery can use here ({error})", url) from None
        return config

    app.add_defaults(configure)
    return app


app = make_app()


@celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _become_a_worker(instance: Any = None, **_: object) -> None:
    """Configure the worker of `celery -A tasks worker`. A worker of another app is only a producer."""
    if instance is not None and instance.app is app:
        options = app.conf.result_backend_transport_options
        app.conf.result_backend_transport_options = {
            name: value for name, value in options.items() if value != CALLERS_PATIENCE
        }
        import_module("tasks.worker").configure(app)


@celeryd_after_setup.connect(weak=False)  # type: ignore[untyped-decorator]
def _warn_of_misspelt_settings(instance: Any = None, **_: object) -> None:
    """Runs after Celery has set up logging."""
    if instance is not None and instance.app is app:
        for line in misspelt():
            logger.warning(line)
        for name in NOT_HEEDED.keys() & os.environ.keys():
            logger.warning("%s is not heeded, set here or on the command line: use %s", name, NOT_HEEDED[name])
