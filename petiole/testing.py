"""For an application's own tests: a real worker, or a fake one without a model. docs/testing.md shows both.

As a pytest plugin (`pytest_plugins = ["petiole.testing"]` in conftest.py) it has the fixtures

    petiole_fake        the fake worker, with an embedded Redis, for one test
    petiole_in_memory   the fake without a Redis: tasks are eager
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from petiole.tasks.testing.fake import FakeWorker, fake
from petiole.tasks.testing.script import Answer, Received
from petiole.tasks.testing.worker import worker

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
