"""The examples of docs/testing.md and docs/django.md run as printed; the page of the latter also in Chromium."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium
from tests.support.proxy import Proxy
from tests.support.site import REPOSITORY, Site, eventually


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

HTML = re.compile(r"```html\n<!-- ([\w/]+\.html) -->\n(.*?)```", re.S)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a reader has who has followed the page."""
    made = run(tmp_path, "-m", "django", "startproject", "shop", ".")
    assert made.returncode == 0, made.stderr
    settings = (tmp_path / "shop" / "settings.py").read_text()
    for name, text in (
        files("django.md") | dict(HTML.findall((REPOSITORY / "docs/django.md").read_text()))
    ).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(settings + text if name == "shop/settings.py" else text)
    return tmp_path


MORE_TESTS = """

import asyncio
import petiole
from django.conf import settings
from django.db import transaction
from petiole.tasks.settings import settings as ours


class More(TransactionTestCase):
    def asked(self):
        return self.client.post("/ask", {"question": "Who are you?"}).json()["id"]

    def test_a_question_without_its_field_is_the_callers_mistake(self):
        self.client.raise_request_exception = False
        assert self.client.post("/ask", {}).status_code == 400

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

    def test_settings_of_django_are_below_the_environment(self):
        assert ours().broker_url.startswith("embedded://") and ours().max_attempts == 7
"""


@pytest.mark.e2e
def test_a_django_project(project: Path) -> None:
    with (project / "shop" / "settings.py").open("a") as settings:
        settings.write("PETIOLE_MAX_ATTEMPTS = 7\n")
    with (project / "shop" / "tests.py").open("a") as tests:
        tests.write(MORE_TESTS)
    ran = run(project, "manage.py", "test", "--verbosity=2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 9 tests" in ran.stderr


WATCHED = """
window.opened = 0;
window.events = [];
window.ended = false;
const Plain = window.EventSource;
window.EventSource = class extends Plain {
  constructor(...given) {
    super(...given);
    this.addEventListener("open", () => window.opened++);
    this.addEventListener("message", (event) => window.events.push([event.lastEventId, event.data]));
    this.addEventListener("end", () => window.ended = true);
  }
};
"""
SERVERS = {
    "wsgi": ("manage.py", "runserver", "--noreload", "127.0.0.1:0"),
    "asgi": ("-m", "uvicorn", "--port=0", "shop.asgi:application"),
}


@contextmanager
def served(project: Path, *command: str, **environment: str) -> Iterator[int]:
    """The project behind its server. Yields the port."""
    log = project / "server.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PETIOLE_")}
    here = {"PYTHONPATH": f"{REPOSITORY}:{project}", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, *command],
            env={**kept, **here, **environment},
            cwd=project,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        found = eventually(lambda: re.search(r"http://127.0.0.1:(\d+)", log.read_text()), f"{command} serves")
        yield int(found[1])
    finally:
        server.kill()
        server.wait()


def refuse(route: Any, refused: list[str]) -> None:
    refused.append(route.request.url)
    route.fulfill(status=502)


@pytest.mark.e2e
@pytest.mark.parametrize("interface", SERVERS)
def test_in_a_browser_whose_connection_is_cut_each_delta_comes_once(
    project: Path, tmp_path_factory: pytest.TempPathFactory, interface: str
) -> None:
    page = project / "shop" / "templates" / "chat.html"
    if interface == "asgi":
        page.write_text(page.read_text().replace("answers/${id}", "answers/${id}/async"))
    with chromium() as browser, Site(tmp_path_factory.mktemp("site"), PETIOLE_FAKE_STEP_MS=40) as site:
        site.worker()
        with served(project, *SERVERS[interface], PETIOLE_BROKER_URL=site.url) as port:
            proxy = Proxy(("127.0.0.1", 0), ("127.0.0.1", port))
            try:
                tab = browser.new_page()
                tab.set_default_timeout(90_000)
                tab.add_init_script(WATCHED)
                tab.goto(f"http://127.0.0.1:{proxy.port}/")
                tab.locator("input[name=question]").fill("Who are you?")
                with tab.expect_response("**/ask") as asked:
                    tab.get_by_role("button", name="Ask").click()
                tab.wait_for_function("window.events.length > 3")
                refused: list[str] = []
                if interface == "wsgi":  # as by a proxy whose server is restarted
                    tab.route("**/answers/**", lambda route: refuse(route, refused), times=1)
                proxy.cut()
                tab.wait_for_function("window.ended")
                opened, events = tab.evaluate("[window.opened, window.events]")
                log = site.log(asked.value.json()["id"])
                shown = tab.locator("#answer").text_content()
                if pictures := os.environ.get("PETIOLE_PICTURES"):
                    tab.screenshot(path=Path(pictures) / f"django_{interface}.png")
            finally:
                proxy.close()
    assert opened > 1, "the connection was not cut while it had events"
    assert len(refused) == (interface == "wsgi")
    assert shown == "".join(delta["text"] for delta in log)
    deltas = [json.loads(data) for _, data in events]
    assert [token for delta in deltas for token in delta["token_ids"]] == [
        token for delta in log for token in delta["token_ids"]
    ]
    assert len({number for number, _ in events}) == len(events)
    assert deltas[-1]["finish_reason"] == "length"
