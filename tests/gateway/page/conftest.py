"""A fleet that takes its time, with an engine whose text is known beforehand; and a browser, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from petiole.tasks.fleet import models
from tests.support.browser import chromium
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Closed behind the last page: while it is open, no other test of this process may begin an event loop."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def slow_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("slow")
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, PETIOLE_FAKE_STEP_MS=30) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


@pytest.fixture(scope="package")
def slow_gateway(slow_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("serve"), PETIOLE_BROKER_URL=slow_site.url) as gateway:
        yield gateway
