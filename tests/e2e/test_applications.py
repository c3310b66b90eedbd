"""The applications in `examples/` run from end to end, each as its reader runs it: a real Redis, real workers, and
the small models that ship."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from io import BytesIO
from pathlib import Path

import pytest

from petiole.tasks.commands.demos.vision import painted, shapes_of
from tests.support.client import environment_of, printed
from tests.support.site import REPOSITORY, Site, eventually

pytestmark = pytest.mark.e2e

EXAMPLES = REPOSITORY / "examples"
ENGINE = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, **ENGINE) as site:
        yield site


@contextmanager
def served(site: Site, *command: str) -> Iterator[str]:
    """The address of a server that says where it listens."""
    log = site.folder / "server.log"
    environment = environment_of(site, EXAMPLES, PYTHONUNBUFFERED="1")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=EXAMPLES, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield eventually(lambda: re.search(r"http://127.0.0.1:\d+", log.read_text()), f"{command} serves")[0]
    finally:
        process.kill()
        process.wait()


def events(body: str) -> list[dict[str, object]]:
    return [json.loads(data) for data in re.findall(r"^data: (\{.*\})$", body, re.M)]


def test_a_chat_in_django(site: Site) -> None:
    pytest.importorskip("django")
    site.worker(PETIOLE_MODEL="petiole-tiny")
    with served(site, "django_chat.py", "runserver", "--noreload", "127.0.0.1:0") as url:
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        page = browser.open(url).read().decode()
        [token] = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        form = urllib.parse.urlencode({"question": "Count from 1 to 40.", "csrfmiddlewaretoken": token})
        task_id = json.load(browser.open(f"{url}/ask", form.encode()))["id"]
        said = events(browser.open(f"{url}/answers/{task_id}").read().decode())
    text = "".join(str(delta.get("text", "")) for delta in said)
    assert text.strip() == ", ".join(map(str, range(1, 41)))


def test_an_agent_in_fastapi(site: Site) -> None:
    pytest.importorskip("fastapi")
    site.worker(PETIOLE_MODEL="petiole-tiny-tools")
    with served(site, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "fastapi_agent:app", "--port", "0") as url:
        asked = urllib.parse.urlencode({"question": "How warm is it in Rome?"})
        said = events(urllib.request.urlopen(f"{url}/ask?{asked}").read().decode())
    assert said == [
        {"called": "weather", "with": {"city": "Rome"}, "result": {"celsius": 20}},
        {"answer": "It is 20 degrees in Rome."},
    ]


def test_a_night_of_parquet(site: Site, tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    site.worker(PETIOLE_MODEL="petiole-tiny")
    questions = [f"What is {n} + {n}?" for n in range(10, 30)]
    parquet.write_table(arrow.table({"question": questions}), str(tmp_path / "questions.parquet"))
    answers = tmp_path / "answers.parquet"
    printed(site, str(EXAMPLES / "nightly_parquet.py"), str(tmp_path / "questions.parquet"), str(answers))
    texts = parquet.read_table(str(answers))["text"].to_pylist()
    assert texts == [f"{n} + {n} = {2 * n}" for n in range(10, 30)]


def test_answers_from_the_docs(site: Site) -> None:
    embedder = site.start_worker("-Q", "embed", PETIOLE_MODEL="petiole-tiny-embed")
    site.worker(PETIOLE_MODEL="petiole-tiny")
    embedder.ready()
    asked = "How do I mount the gateway in an ASGI application of my own?"
    shown = printed(site, str(EXAMPLES / "ask_the_docs.py"), asked)
    found, _, said = shown.partition("\n\n")
    assert len(found.splitlines()) == 3
    assert all((REPOSITORY / "docs" / line.partition(": ")[0]).exists() for line in found.splitlines())
    assert said.strip()


def test_questions_about_a_picture(site: Site, tmp_path: Path) -> None:
    site.worker(PETIOLE_MODEL="petiole-tiny-vision")
    painted(shapes_of(1)).save(file := BytesIO(), "PNG")
    (tmp_path / "shapes.png").write_bytes(file.getvalue())
    shown = printed(
        site,
        str(EXAMPLES / "image_questions.py"),
        str(tmp_path / "shapes.png"),
        "circle",
        "How many circles are there?",
    )
    said = json.loads(shown)
    assert said["answer"]
    assert said["caption"]
    assert len(said["points"]) == len(said["boxes"]) > 0


def test_every_example_is_named_and_is_a_file_to_read() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.M))
    assert [name for name in files if (EXAMPLES / name).read_text().count("\n") > 120] == []
