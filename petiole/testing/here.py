"""Makes this process submit to the Redis of the tests, whatever the environment names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from petiole.tasks.app import interop
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.app.configuration import celery_url, configuration
from petiole.tasks.servers import connections
from petiole.tasks.settings import IN_FILES, PREFIX, settings


def _connected_elsewhere() -> bool:
    if celery_app._backend_cache is None and not celery_app.pools.made:
        return False
    return bool(celery_app.conf.broker_url != celery_url("embedded://"))


@contextlib.contextmanager
def submitting(queue: str, changed: Mapping[str, object]) -> Iterator[None]:
    """Submit to `queue` of the embedded Redis. `changed`: more settings.

    Raises RuntimeError if this process has connected to another broker before, because Celery keeps its
    connections. Settings that were only read are replaced: pytest causes that when it looks at the tasks of a
    module."""
    if _connected_elsewhere():
        raise RuntimeError(
            "petiole.testing: must begin before this process submits or reads its first task: Celery is connected"
            " to another broker"
        )
    temporary = {
        **{f"{PREFIX}{name.upper()}_FILE": "" for name in IN_FILES},
        f"{PREFIX}BROKER_URL": "embedded://",
        f"{PREFIX}REDIS_URL": "",
        f"{PREFIX}RESULT_BACKEND": "",
        f"{PREFIX}QUEUE": queue,
        **{f"{PREFIX}{name.upper()}": str(value) for name, value in changed.items()},
    }
    before = {name: os.environ.get(name) for name in temporary}
    os.environ.update(temporary)
    _read_again()
    outer, interop.covered = interop.covered, True
    try:
        yield
    finally:
        interop.covered = outer
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if outer:
            _read_again()  # of the tests around this one
        else:
            settings.cache_clear()


def _read_again() -> None:
    settings.cache_clear()
    connections._streams.cache_clear()
    if celery_app.is_configured:
        celery_app.conf.update(configuration(settings()))
        celery_app.__dict__.pop("amqp", None)  # knows the default queue
