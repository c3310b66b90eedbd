"""Run the asynchronous engine with a watchdog: a test that hangs prints every thread's stack."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    limit_s = 240 + float(os.environ.get("PETIOLE_STRESS_SECONDS", "0"))
    faulthandler.dump_traceback_later(limit_s, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
