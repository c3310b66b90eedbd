"""An application with a `tasks.py`, a `cache.py` and a `bench/` of its own installs the wheel: its Celery app and
Petiole's both work there."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.rabbitmq import free_port
from tests.support.site import PATIENCE_S, REPOSITORY, RedisServer
from tests.support.wheels import build, environment, install

PAGE = (REPOSITORY / "docs" / "existing-app.md").read_text()
FILES = {
    **dict(re.findall(r"```python\n# (views\.py)\n(.*?)```", PAGE, re.S)),
    "tasks.py": """
import os
from celery import Celery
import cache
app = Celery("shop", broker=os.environ["SHOP_REDIS"], backend=os.environ["SHOP_REDIS"])
app.conf.task_default_queue = "shop"

@app.task
def fetch_article(number):
    return f"article {number}"

@app.task
def send_digest(given):
    return [one["text"] for one in (given if isinstance(given, list) else [given])]

@app.task
def try_again(failed_id, request, left):
    from petiole import generate
    if left:
        generate.apply_async(kwargs=request, link_error=try_again.s(request, left - 1))
    return failed_id

@app.task(name="tasks.price")
def price(article):
    return cache.PRICES[article]
""",
    "cache.py": 'PRICES = {"leaf": 3}\n',
    "bench/__init__.py": "",
    "bench/__main__.py": "raise SystemExit('the shop has its own bench')\n",
    "shop.py": """
import asyncio, json, logging, sys

import bench, cache, tasks
from petiole import InvalidRequest, astream, chat, generate, stream

async def texts(result):
    return [delta.text async for delta in astream(result)]

assert tasks.price.delay("leaf").get(timeout=90) == 3
result = generate.delay(prompt="Count from 1 to 5.", max_tokens=8, temperature=0)
read = "".join(delta.text for delta in stream(result, timeout_s=90))
assert result.get(timeout=90)["text"] == read == "".join(asyncio.run(texts(result)))
answer = chat.delay(messages=[{"role": "user", "content": "Hi"}], max_tokens=4).get(timeout=90)
assert answer["usage"]["completion_tokens"] <= 4

too_long = generate.delay(prompt=[1] * 100_000, max_tokens=1)
try:
    too_long.get(timeout=90)
except InvalidRequest as error:
    assert error.field == "prompt", error
else:
    raise AssertionError("it was not refused")
stored = json.loads(too_long.app.backend.get(too_long.app.backend.get_key_for_task(too_long.id)))
assert stored["result"]["exc_module"] == "tasks.errors", stored

from celery import chain, chord
from petiole import NoWorker
from tasks import fetch_article, send_digest, try_again

linked = chain(fetch_article.s(3), generate.s(prompt="Count: ", max_tokens=4), send_digest.s())
assert len(linked.delay().get(timeout=90)) == 1
texts = chord([generate.s(prompt=str(n), max_tokens=4) for n in range(2)])(send_digest.s()).get(timeout=90)
assert len(texts) == 2, texts
request = {"prompt": [1] * 100_000, "max_tokens": 1}
generate.apply_async(kwargs=request, link_error=try_again.s(request, 2))

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)
lost = generate.delay(prompt="x", queue="petiol")
for delta in stream(lost, heartbeat_s=1):
    if said:
        break
assert said[0].startswith("no worker serves queue 'petiol'; queues with workers: petiole")
try:
    generate.delay(prompt="x", queue="petiol", require_worker=True)
except NoWorker:
    pass
else:
    raise AssertionError("it was submitted")
for name, hint in {"response_format": "json_schema", "max_completion_tokens": "max_tokens", "n": "a group",
                   "stream": "generate.stream(...)", "tool_choice": "one of chat",
                   "temprature": "temperature"}.items():
    try:
        generate.delay(prompt="x", **{name: 1})
    except InvalidRequest as error:
        assert hint in str(error), error
    else:
        raise AssertionError(name)

for name in ("tasks", "cache", "bench"):
    assert sys.modules[name].__file__.startswith(sys.argv[1]), name
assert not [name for name in sys.modules if name.startswith(("tasks.", "cache.", "gpu_worker"))]
print("the shop is open")
""",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with a checkout's wheel. Its dependencies are those installed here."""
    python = environment(tmp_path_factory.mktemp("environment"))
    [packages] = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))  # but not the links in them
    install(python, build("wheel", tmp_path_factory.mktemp("wheel")))
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


@contextmanager
def worker(python: Path, app: str, cwd: Path, environment: dict[str, str], *options: str) -> Iterator[Path]:
    """A worker of `celery -A app`, ready. Yields its log."""
    log = cwd.parent / f"{app}.log"
    command = [
        str(python),
        "-m",
        "celery",
        "-A",
        app,
        "worker",
        "-n",
        f"{app}@shop",
        "--loglevel",
        "INFO",
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        give_up_at = time.monotonic() + PATIENCE_S
        while f"{app}@shop ready." not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < give_up_at, log.read_text(errors="replace")
            time.sleep(0.05)
        yield log
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def web_server(python: Path, cwd: Path, environment: dict[str, str]) -> Iterator[str]:
    """uvicorn with the page's view. Yields its URL."""
    port = free_port()
    command = [str(python), "-m", "uvicorn", "views:app", "--port", str(port)]
    log = cwd.parent / "views.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        give_up_at = time.monotonic() + PATIENCE_S
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_at, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def loaded(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE_S) as answer:
        return json.load(answer)


def clean(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PETIOLE_"))}
    return {**kept, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **more}


@pytest.mark.e2e
def test_an_application_with_the_same_names_and_both_workers(tmp_path: Path, python: Path, project: Path) -> None:
    server = RedisServer(tmp_path)
    environment = clean(
        SHOP_REDIS=server.url,
        PETIOLE_BROKER_URL=server.url,
        PETIOLE_LINKED_QUEUE="shop",
        PETIOLE_MAX_NUM_SEQS="4",
        PETIOLE_DEVICE="cpu",
        PETIOLE_ENGINE_FACTORY="gpu_worker.engine:Engine",  # as settings of checkouts have it
    )
    try:
        with (
            worker(python, "tasks", project, environment, "--pool", "solo") as shops,
            worker(python, "petiole", project, environment) as ours,
        ):
            command = [str(python), "shop.py", str(project)]
            done = subprocess.run(
                command, cwd=project, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr + ours.read_text()[-3000:]
            assert done.stdout.strip() == "the shop is open"
            with web_server(python, project, environment) as url:
                text = urllib.parse.quote("a leaf has a petiole")
                task_id = loaded(f"{url}/summaries?text={text}", "POST")["id"]
                with urllib.request.urlopen(f"{url}/summaries/{task_id}/stream", timeout=PATIENCE_S) as stream:
                    read = [stream.read1()]  # before the end: 200 tokens take a while
                    read += iter(stream.read1, b"")
                assert len(read) > 1
                assert b"".join(read).decode() == loaded(f"{url}/summaries/{task_id}")["text"]
            assert "tasks.price" in shops.read_text()
            give_up_at = time.monotonic() + PATIENCE_S
            while shops.read_text().count("Task tasks.try_again") < 3 * 2:  # received, and succeeded
                assert time.monotonic() < give_up_at, shops.read_text()
                time.sleep(0.05)
            assert "petiole_tiny" not in shops.read_text()
    finally:
        server.kill()


def test_without_a_checkout_there_are_no_benchmarks(python: Path, project: Path) -> None:
    command = [str(python.parent / "petiole"), "bench", "--quick"]
    done = subprocess.run(command, cwd=project, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "petiole: the benchmarks need a checkout of Petiole's repository: run it there\n"


def test_the_short_names_are_those_of_a_checkout_alone(tmp_path: Path, python: Path) -> None:
    for name in ("gateway", "tasks", "gpu_worker", "cache", "bench", "training"):
        command = [str(python), "-c", f"import {name}"]
        done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False)
        assert f"No module named '{name}'" in done.stderr
