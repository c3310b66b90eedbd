"""Chromium, if there is one: Playwright, and a Chromium of the system's or of Playwright's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    found = os.environ.get("PETIOLE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()
