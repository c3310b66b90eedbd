"""A producer and its readers with a real worker: what is submitted comes back, as a stream and as a result."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from PIL import Image

from petiole.tasks import InvalidRequest, StreamDelta
from petiole.tasks.fleet import control
from petiole.tasks.settings import settings
from petiole.tasks.streams import readers
from tests.support.client import client
from tests.support.fake_engine import expected
from tests.support.site import REPOSITORY, Site, Worker, eventually

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as site:
        site.worker()
        yield site


@pytest.fixture(autouse=True)
def _our_settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a producer of the test's site."""
    name = "own_site" if "own_site" in request.fixturenames else "site"
    monkeypatch.setenv("PETIOLE_BROKER_URL", request.getfixturevalue(name).url)
    monkeypatch.delenv("PETIOLE_REDIS_URL", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0) as site:
        yield site


@pytest.fixture
def runtime_folder() -> Iterator[str]:
    """For an embedded Redis of one's own; a short path, because it must hold a socket."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        yield folder


def tokens_of(deltas: list[StreamDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_stream_submits_and_reads(site: Site) -> None:
    tokens, text, result = client(
        site,
        """
reader = generate.stream(prompt="hello", max_tokens=30, seed=7)
deltas = list(reader)
print(json.dumps([[t for d in deltas for t in d.token_ids], "".join(d.text for d in deltas), reader.result.get()]))
""",
    )
    assert tokens == result["token_ids"] == expected("hello", 7, 30)
    assert text == result["text"]


def test_astream_submits_and_reads(site: Site) -> None:
    tokens = client(
        site,
        """
async def read(n):
    return [t async for d in generate.astream(prompt=f"p{n}", max_tokens=20, seed=n) for t in d.token_ids]
async def read_all():
    return await asyncio.gather(*map(read, range(8)))
print(json.dumps(asyncio.run(read_all())))
""",
    )
    assert tokens == [expected(f"p{n}", n, 20) for n in range(8)]


def test_a_group_is_waited_for_without_pauses_and_its_results_are_not_kept(site: Site) -> None:
    code = """
import time
from types import SimpleNamespace
import celery.backends.base as base
from celery import group

pauses = []
base.time = SimpleNamespace(**{**vars(time), "sleep": pauses.append})
groups = [group(generate.s(prompt="g", max_tokens=40) for _ in range(6)) for _ in range(3)]
results = [one.apply_async().get(timeout=60) for one in groups]
late = {"task_id": "t", "status": "SUCCESS", "result": results[0][0]}
backend = generate.app.backend
backend.result_consumer.on_state_change(late, {"type": "message"})
print(json.dumps([sum(map(len, results)), max(pauses, default=0), len(backend._pending_messages)]))
"""
    assert client(site, code) == [18, 0, 0]


def test_a_conversation(site: Site) -> None:
    text, result = client(
        site,
        """
result = chat.delay(messages=[{"role": "user", "content": "hello"}], max_tokens=10)
print(json.dumps(["".join(d.text for d in stream(result)), result.get()]))
""",
    )
    assert text == result["text"]
    assert result["usage"]["completion_tokens"] == 10


def test_a_bad_request_is_the_same_error_in_result_and_stream(site: Site) -> None:
    result = site.generate("hello", max_tokens=0)
    with pytest.raises(InvalidRequest) as from_result:
        site.get(result)
    with pytest.raises(InvalidRequest) as from_stream:
        list(readers.Stream(result, app=site.app))
    assert str(from_result.value) == str(from_stream.value) == "max_tokens: must be at least 1, got 0"


def test_what_only_the_engine_can_refuse(site: Site) -> None:
    result = site.generate("hello", max_tokens=10**6)
    with pytest.raises(InvalidRequest, match="must have at most 4096 tokens"):
        site.get(result)


def test_cancel_ends_stream_and_task(site: Site) -> None:
    result = site.generate("long", max_tokens=3000)
    with readers.Stream(result, app=site.app) as reader:
        first = next(reader)
        control.cancel(result, site.app)
        *_, last = reader
    assert first.index == 0
    assert last.finish_reason == "cancelled"
    with pytest.raises(TaskRevokedError):
        site.get(result)


def test_a_closed_reader_cancels_if_it_was_to(site: Site) -> None:
    result = site.generate("long", max_tokens=3000, cancel_on_disconnect=True)
    with readers.Stream(result, cancel_on_disconnect=True, app=site.app) as reader:
        next(reader)
    eventually(lambda: result.state == "REVOKED", "REVOKED")


def test_readers_go_on_when_the_worker_dies(own_site: Site) -> None:
    """Early, late, and asynchronous readers all get the undisturbed run's tokens, each once."""
    first: Worker = own_site.worker(PETIOLE_FAKE_STEP_MS=5)
    result = own_site.generate("long", max_tokens=300, seed=3)
    early = readers.Stream(result, app=own_site.app)
    deltas = [next(early)]
    own_site.streaming(result, at_least=50)
    first.kill()
    own_site.worker(PETIOLE_FAKE_STEP_MS=5)
    deltas += early

    async def read() -> list[StreamDelta]:
        return [delta async for delta in readers.AsyncStream(result, app=own_site.app)]

    late = asyncio.run(read())
    assert tokens_of(deltas) == tokens_of(late) == expected("long", 3, 300)
    assert [delta.index for delta in late] == sorted({delta.index for delta in late})
    assert (deltas[0].attempt, deltas[-1].attempt) == (1, 2)
    assert own_site.get(result)["text"] == "".join(delta.text for delta in deltas)


def test_eager_tasks_run_an_engine_here(site: Site) -> None:
    result = client(
        site, 'print(json.dumps(generate.apply(kwargs=dict(prompt="hello", max_tokens=5, seed=1)).get()))'
    )
    assert result["token_ids"] == expected("hello", 1, 5)


def test_status_shows_a_worker_and_drain_ends_it(own_site: Site) -> None:
    worker = own_site.worker()

    def petiole(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **own_site.environment}
        command = [sys.executable, "-m", "petiole.tasks.commands.cli", *arguments]
        return subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )

    def reported() -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = json.loads(petiole("status", "--json").stdout)["workers"]
        return workers

    (shown,) = eventually(reported, "a report")
    assert (shown["worker"], shown["state"], shown["slots"], shown["lost"]) == (worker.node, "ready", 8, False)
    drained = petiole("drain", worker.node, "--wait", "20")
    assert (drained.returncode, drained.stderr) == (0, "")
    assert worker.process.wait(20) == 0


def test_a_worker_holds_four_tasks_more_than_its_engine_decides_to_run(own_site: Site) -> None:
    worker = own_site.worker(PETIOLE_MAX_NUM_SEQS="0", PETIOLE_FAKE_PLACES="3")
    held = [own_site.generate(f"p{i}", max_tokens=3000) for i in range(9)]
    own_site.streaming(held[2])
    inspect = own_site.app.control.inspect(timeout=10, limit=1)
    eventually(lambda: len(inspect.active()[worker.node] + inspect.reserved()[worker.node]) == 7, "seven tasks")
    stats = inspect.stats()[worker.node]
    assert (stats["prefetch_count"], stats["pool"]["max-concurrency"]) == (7, 7)
    assert stats["pool"]["engine"]["running"] == 3


def test_the_demo_gets_every_answer_right_and_leaves_nothing(runtime_folder: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "petiole.tasks.commands.cli", "demo", "--plain"],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": runtime_folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 of 8 right" in ran.stdout
    eventually(lambda: not os.listdir(runtime_folder), "the embedded Redis has ended")


@pytest.mark.slow
def test_the_demo_over_http_answers_until_it_is_stopped(runtime_folder: str) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "petiole.tasks.commands.cli", "demo", "--http"],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": runtime_folder, "PETIOLE_GATEWAY_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    url = next(line.split()[1] for line in demo.stdout if line.startswith("serving "))
    asked = {"model": "petiole-tiny", "prompt": "Count from 1 to 5.", "temperature": 0}
    body = json.dumps(asked).encode()

    def answer() -> str:
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as found:
                return str(json.load(found)["choices"][0]["text"])
        except urllib.error.HTTPError:  # the worker has not said what it serves
            return ""

    assert "1, 2, 3, 4, 5" in eventually(answer, "an answer")
    demo.send_signal(signal.SIGINT)
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, said
    eventually(lambda: not _workers_of(demo.pid), "the worker has ended")


@pytest.mark.slow
def test_the_demo_of_vision_saves_its_picture(runtime_folder: str, tmp_path: Path) -> None:
    saved = tmp_path / "picture.png"
    ran = subprocess.run(
        [sys.executable, "-m", "petiole.tasks.commands.cli", "demo", "--vision", "--save", str(saved)],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": runtime_folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "What color is the" in ran.stdout
    with Image.open(saved) as picture:
        assert picture.size == (650, 550)
    eventually(lambda: not os.listdir(runtime_folder), "the embedded Redis has ended")


@pytest.mark.slow
def test_the_demo_of_a_search_finds_passages_by_what_they_mean(runtime_folder: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "petiole.tasks.commands.cli", "demo", "--search"],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": runtime_folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "7 of 7 questions have found their passage." in ran.stdout
    eventually(lambda: not os.listdir(runtime_folder), "the embedded Redis has ended")


def test_a_demo_whose_worker_cannot_start_shows_why(runtime_folder: str) -> None:
    environment = {"XDG_RUNTIME_DIR": runtime_folder, "PETIOLE_ENGINE_FACTORY": "no_such_module:Engine"}
    ran = subprocess.run(
        [sys.executable, "-m", "petiole.tasks.commands.cli", "demo", "--plain"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "petiole: the worker ended with status" in ran.stderr
    assert "no_such_module" in ran.stderr
    eventually(lambda: not os.listdir(runtime_folder), "the embedded Redis has ended")


@pytest.mark.slow
def test_an_interrupted_demo_leaves_nothing(runtime_folder: str) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "petiole.tasks.commands.cli", "demo", "--plain"],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": runtime_folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # who runs tests behind `&` ignores it
    )
    assert demo.stdout is not None
    assert "Starting" in demo.stdout.readline()
    eventually(lambda: _workers_of(demo.pid), "a worker")
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=30)
    assert demo.returncode == 130, said
    eventually(lambda: not _workers_of(demo.pid), "the worker has ended")  # by the kernel, if it was just begun
    eventually(lambda: not os.listdir(runtime_folder), "the embedded Redis has ended")


def _workers_of(demo: int) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"demo-{demo}@localhost".encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found
