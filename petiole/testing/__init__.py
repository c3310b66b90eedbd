"""For an application's own tests: a real worker, or a fake one without a model. docs/testing.md shows both.

As a pytest plugin (`pytest_plugins = ["petiole.testing"]` in conftest.py) it has the fixtures `petiole_fake`, the
fake worker with an embedded Redis, and `petiole_in_memory`, the fake without a Redis. Applications call it;
nothing of Petiole does.

    worker  a real worker on petiole-tiny, and a Redis of the tests
    fake    a worker without a model, on threads of the test's process: it takes messages and runs Celery's trace
    here    makes this process submit to the tests' Redis
    stream  the stream of one task, written with a worker's scripts
    script  what the fake answers, and the tasks that it has had
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from petiole.testing.fake import FakeWorker, fake
from petiole.testing.script import Answer, Received
from petiole.testing.worker import worker

__all__ = ["Answer", "FakeWorker", "Received", "fake", "worker"]

with suppress(ImportError):  # the real worker needs no pytest
    import pytest

    @pytest.fixture(scope="session")
    def _petiole_fakes() -> Iterator[FakeWorker]:
        with fake() as made:
            yield made

    @pytest.fixture
    def petiole_fake(_petiole_fakes: FakeWorker) -> FakeWorker:
        """The fake worker: `petiole_fake.answers("Hello.")`, and then `petiole_fake.received`."""
        _petiole_fakes.reset()
        return _petiole_fakes

    @pytest.fixture
    def petiole_in_memory() -> Iterator[FakeWorker]:
        """The fake worker without a Redis: tasks run where they are submitted."""
        with fake(in_memory=True) as made:
            yield made
