"""The Celery application: one object, configured from the environment at its first use.

Producers and workers share it. Only a worker process calls `tasks.worker.boot.configure`, which installs
the transport and the worker's other extensions. A producer never imports that package: the pool is configured by
dotted name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from celery import Celery, _state
from celery.app.backends import by_url
from celery.app.utils import Settings as StockConfiguration
from celery.signals import celeryd_after_setup, celeryd_init

from petiole import _lazy
from petiole.contract.settings.urls import RABBITMQ, SENTINEL, scheme
from petiole.contract.tasks import TASKS
from petiole.tasks.app import interop, worker_side
from petiole.tasks.app.amqp import Amqp, Breaker, ConnectionPools, whole_second
from petiole.tasks.app.stored_errors import with_stored_errors

if TYPE_CHECKING:
    from petiole.tasks import settings
    from petiole.tasks.app import configuration
else:
    configuration = _lazy.module("petiole.tasks.app.configuration")
    settings = _lazy.module("petiole.tasks.settings")

logger = logging.getLogger(__name__)

BACKENDS = {
    "redis": "petiole.tasks.app.backend:RedisBackend",
    "rediss": "petiole.tasks.app.backend:RedisBackend",
    SENTINEL: "petiole.tasks.app.backend:SentinelBackend",
}


@lru_cache(maxsize=1024)
def _names(others: tuple[Callable[[str], str], ...] | None, prefix: str | None, key: str) -> Sequence[str]:
    """The names under which Celery looks for a setting."""
    names: Sequence[str] = StockConfiguration({}, keys=others, prefix=prefix)._to_keys(key)
    return names


class Configuration(StockConfiguration):  # type: ignore[misc]
    """Celery's settings without `CELERY_BROKER_URL` and the like, which may be meant for other apps.

    A submission reads nine of them. Celery raises and catches an exception for each of a setting's names, in each
    map that lacks it. That is a tenth of the time of a submission."""

    def __getitem__(self, key: str) -> Any:
        names = _names(self._keys, self.prefix, key)
        for mapping in self.maps:
            for name in names:
                if name in mapping:
                    return mapping[name]
        return super().__getitem__(key)

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
    """A Celery app that several threads may configure, and that may be forked.

    Celery shows other threads a configuration before its defaults are set. So if two threads submit first, one of
    them could use the default broker URL. Here other threads see only the complete configuration."""

    _conf: Any  # Celery's
    _pending_defaults: Any
    configured: bool
    _complete = False
    amqp_cls = Amqp
    control_cls = "petiole.tasks.app.redis_transport:Control"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._configuring = threading.RLock()
        self.breaker = Breaker()
        self.pools = ConnectionPools(self)
        super().__init__(*args, **options)
        object.__setattr__(self._conf, "__class__", Configuration)  # a plain assignment would be a setting

    watcher: Callable[[Iterable[str | None]], Any] | None = None
    """Makes the `QueueWatch` of queues that callers wait for. Set by `tasks.submission.task`."""

    def watch(self, queues: Iterable[str | None]) -> Any:
        return None if self.watcher is None else self.watcher(queues)

    @property
    def is_configured(self) -> bool:
        """Whether the settings have been read. Does not read them."""
        return self._complete

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
        return self.pools.connections

    def _get_backend(self) -> Any:
        kind, url = by_url(self.backend_cls or self.conf.result_backend, self.loader)
        return with_stored_errors(kind)(app=self, url=url)

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
        timed = countdown is not None or eta is not None
        if timed and scheme(self.conf.broker_url) in RABBITMQ:
            countdown, eta = whole_second(countdown, eta, self.now())
        with interop.sent_by_petiole():
            return super().send_task(name, args, kwargs, countdown, eta, *more, **options)

    @cached_property
    def AsyncResult(self) -> Any:  # noqa: N802 - Celery's name
        return self.subclass_with_self("petiole.tasks.streams.readers:AsyncGeneration")

    @cached_property
    def Worker(self) -> Any:  # noqa: N802 - Celery's name
        return self.subclass_with_self(worker_side.PROGRAM)


def make_app() -> Celery:
    """A Celery app that reads its settings, and starts an embedded Redis, at its first use.

    If the process already has a Celery app, that one stays the current app.
    """
    first = _state.default_app is None and _state._tls.current_app is None
    app = App("petiole", include=["petiole.tasks.submission.definitions"], set_as_current=first)
    app.loader.override_backends = BACKENDS

    app.add_defaults(lambda: configuration.of_this_process(app.loader))
    return app


app = make_app()
interop.watch(app, TASKS)


@celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _become_a_worker(instance: Any = None, **_: object) -> None:
    """Configure the worker of `celery -A tasks worker`. A worker of another app is only a producer."""
    if instance is not None and instance.app is app:
        options = app.conf.result_backend_transport_options
        app.conf.result_backend_transport_options = {
            name: value for name, value in options.items() if value != configuration.PUBLISH_RETRY_POLICY
        }
        worker_side.load(worker_side.CONFIGURE)(app)


@celeryd_after_setup.connect(weak=False)  # type: ignore[untyped-decorator]
def _warn_of_misspelt_settings(instance: Any = None, **_: object) -> None:
    """Runs after Celery has set up logging."""
    if instance is not None and instance.app is app:
        for line in [*settings.misspelt(), *settings.ignored_urls()]:
            logger.warning("%s", line)
