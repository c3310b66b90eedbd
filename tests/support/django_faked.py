"""Tests as a Django project has them: its own worker beside the fake one. They run under pytest elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django
import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from django.conf import settings

from petiole import generate
from petiole.testing import FakeWorker

NOWHERE = "redis://127.0.0.1:1/0"
settings.configure(CELERY_BROKER_URL=NOWHERE, CELERY_RESULT_BACKEND=NOWHERE, SECRET_KEY="of a test")
django.setup()

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task
def shout(result: dict[str, Any]) -> str:
    return str(result["text"]).upper()


@pytest.fixture
def both(petiole_fake: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorker]:
    monkeypatch.setattr(settings, "CELERY_BROKER_URL", petiole_fake.url)
    monkeypatch.setattr(settings, "CELERY_RESULT_BACKEND", petiole_fake.url)
    with start_worker(app, perform_ping_check=False):
        yield petiole_fake


def test_a_task_of_the_project_follows(both: FakeWorker) -> None:
    both.answers("short")
    chain = generate.s(prompt="x", max_tokens=4) | shout.s()
    assert chain.delay().get(timeout=60) == "SHORT"
