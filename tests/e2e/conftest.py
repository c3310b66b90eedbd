"""One redis-server and one worker for the tests of a module; tests that kill things make their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.site import Site, Worker


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="module")
def worker(site: Site) -> Worker:
    return site.worker()


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """For what must not be shared. Leases are short, so that the dead are noticed soon."""
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0) as site:
        yield site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.e2e)
