"""One redis-server and one worker for the tests of a module; tests that kill things make their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from petiole.tasks.app.application import BACKENDS
from petiole.tasks.settings import settings
from tests.support.certificates import Certificates
from tests.support.site import Site, Worker
from tests.support.watched import SENTINEL_PASSWORD, Watched

WatchedSite = Callable[..., Site]


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


@pytest.fixture
def watched_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedSite]:
    """A site whose worker, producer and readers are told the sentinels' addresses, and nothing of Redis's."""
    sites: list[Site] = []

    def make(*options: str, binary: str | None = None, tls: Certificates | None = None) -> Site:
        monkeypatch.setenv("PETIOLE_SENTINEL_PASSWORD", SENTINEL_PASSWORD)
        settings.cache_clear()
        watched = Watched(tmp_path / "redis", *options, binary=binary, tls=tls)
        monkeypatch.setenv("PETIOLE_BROKER_URL", watched.url)
        settings.cache_clear()
        site = Site(tmp_path, server=watched, PETIOLE_VISIBILITY_TIMEOUT_S=2)
        site.app.loader.override_backends = BACKENDS
        sites.append(site)
        return site

    yield make
    for site in sites:
        site.__exit__(None, None, None)
    monkeypatch.undo()
    settings.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
