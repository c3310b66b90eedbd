"""A fleet that takes its time, with an engine whose text is known beforehand; and a browser, if there is one:
Playwright, and a Chromium of the system's or of Playwright's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from petiole.tasks.fleet import models
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("PETIOLE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


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
