"""The examples of docs/testing.md and docs/django.md are run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY


def files(page: str) -> dict[str, str]:
    """By path, the examples that begin with their path."""
    return dict(re.findall(r"```python\n# ([\w/]+\.py)\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.S))


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PETIOLE_")}
    here = {"PYTHONPATH": f"{REPOSITORY}:{folder}", "PETIOLE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, **here, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("names", [("test_fake.py",), ("test_eager.py",), ("conftest.py", "test_worker.py")])
def test_an_example(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text(files("testing.md")[name])
    ran = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr


# ---------------------------------------------------------------- docs/django.md

REST_OF_SETTINGS = """
SECRET_KEY = "of a test"
DEBUG = True
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["shop"]
ALLOWED_HOSTS = ["*"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
MORE_TESTS = """

import asyncio
import petiole
from django.conf import settings
from django.core.management import call_command
from django.db import transaction
from io import StringIO
from petiole.tasks.settings import settings as ours


class More(TransactionTestCase):
    def asked(self):
        return self.client.post("/ask", {"question": "Who are you?"}).json()["id"]

    def events(self, path, **headers):
        return b"".join(self.client.get(path, headers=headers).streaming_content).decode().split("\\n\\n")

    def test_a_browser_that_comes_back_gets_the_rest(self):
        path = f"/answers/{self.asked()}"
        whole = [event for event in self.events(path) if not event.startswith(":")]
        for n, event in enumerate(whole):
            if event.startswith("id: "):
                assert self.events(path, last_event_id=event.split()[1]) == whole[n + 1 :], n
        assert self.client.get(path, headers={"last-event-id": "x"}).status_code == 400

    def test_the_same_under_asgi(self):
        async def follow(task_id):
            answer = await self.async_client.get(f"/answers/{task_id}/async")
            return b"".join([part async for part in answer.streaming_content]).decode()

        task_id = self.asked()
        assert asyncio.run(follow(task_id)) == "\\n\\n".join(self.events(f"/answers/{task_id}"))

    def test_a_rollback_submits_nothing(self):
        with transaction.atomic():
            result = petiole.generate.delay_on_commit(prompt="a", max_tokens=1, registered=True)
            transaction.set_rollback(True)
        assert self.client.get(f"/answers/{result.id}").status_code == 404

    def test_a_commit_does(self):
        with transaction.atomic():
            result = petiole.generate.delay_on_commit(prompt="a", max_tokens=1, registered=True)
            assert self.client.get(f"/answers/{result.id}").status_code == 404
        assert result.get(timeout=60)["usage"]["completion_tokens"] <= 1

    def test_an_invalid_request_is_refused_before_the_commit(self):
        with self.assertRaisesMessage(petiole.InvalidRequest, "max_tokens: must be at least 1, got 0"):
            petiole.generate.delay_on_commit(prompt="a", max_tokens=0)

    def test_in_an_asynchronous_view(self):
        async def submit():
            return await petiole.generate.adelay_on_commit(prompt="a", max_tokens=1)

        assert asyncio.run(submit()).get(timeout=60)["text"] is not None

    def test_the_command(self):
        out = StringIO()
        call_command("summarize", "one", "two", stdout=out)
        assert out.getvalue()

    def test_settings_of_django_are_below_the_environment(self):
        assert ours().broker_url.startswith("embedded://") and ours().max_attempts == 7
"""


@pytest.mark.e2e
def test_a_django_project(tmp_path: Path) -> None:
    for name, text in files("django.md").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for package in ("shop", "shop/management", "shop/management/commands"):
        (tmp_path / package / "__init__.py").touch()
    with (tmp_path / "shop" / "settings.py").open("a") as settings:
        settings.write(REST_OF_SETTINGS + "PETIOLE_MAX_ATTEMPTS = 7\n")
    with (tmp_path / "shop" / "tests.py").open("a") as tests:
        tests.write(MORE_TESTS)
    ran = run(tmp_path, "-m", "django", "test", "--verbosity=2", DJANGO_SETTINGS_MODULE="shop.settings")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 9 tests" in ran.stderr
