"""An embedded Redis and a worker on petiole-tiny, as `petiole demo` starts them.

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

from petiole.tasks.commands.demos import demo
from petiole.testing import here


@contextlib.contextmanager
def worker(**changed: object) -> Iterator[None]:
    """Run a worker, and make this process submit to it. `changed`: settings of both, such as `max_num_seqs=4`.

    Raises RuntimeError if this process has connected to another broker before, because Celery keeps its
    connections."""
    given = {"model": "petiole-tiny", "drain_seconds": 0, **changed}
    with here.submitting(f"petiole-test-{os.getpid()}", given), demo.worker("test"):
        yield
