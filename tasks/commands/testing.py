"""For an application's own tests: an embedded Redis and a worker on petiole-tiny, as `petiole demo` starts them.

    @pytest.fixture(scope="session")
    def petiole():
        with testing.worker():
            yield

The broker, the result backend and the model that the environment names are ignored. The worker has a queue of its
own, which keeps the tests apart from whatever else runs on the embedded Redis."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from petiole.tasks.app.application import app as celery_app
from petiole.tasks.app.configuration import configuration
from petiole.tasks.commands import demo
from petiole.tasks.servers import embedded
from petiole.tasks.settings import PREFIX, settings


@contextlib.contextmanager
def worker(**changed: object) -> Iterator[None]:
    """Run a worker, and make this process submit to it. `changed`: settings of both, such as `max_num_seqs=4`.

    Raises RuntimeError if this process has connected before, because Celery keeps its connections. Settings that
    were only read are replaced: pytest causes that when it looks at the tasks of a module."""
    if celery_app._pool is not None or celery_app._backend_cache is not None:
        raise RuntimeError("testing.worker: must be entered before this process submits or reads its first task")
    given = {f"{PREFIX}{name.upper()}": str(value) for name, value in changed.items()}
    temporary = {**demo.environment(), f"{PREFIX}QUEUE": f"petiole-test-{os.getpid()}", **given}
    before = {name: os.environ.get(name) for name in temporary}
    os.environ.update(temporary)
    settings.cache_clear()
    if celery_app.is_configured:
        celery_app.conf.update(configuration(settings()))
    try:
        with demo.worker("test"):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        settings.cache_clear()
        embedded.release()
