"""Petiole on RabbitMQ: the broker keeps the messages, Redis the streams and the results."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.fake_engine import expected
from support.site import Site, eventually

from tasks.app import App, configuration
from tasks.fleet import queue_lengths
from tasks.settings import Settings, settings

BINARY = shutil.which("rabbitmq-server") or "/usr/lib/rabbitmq/bin/rabbitmq-server"
pytestmark = pytest.mark.skipif(not Path(BINARY).exists(), reason="rabbitmq-server is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("rabbit")
    port, epmd = free_port(), free_port()
    binary = "/usr/lib/rabbitmq/bin/rabbitmq-server"
    environment = {
        **os.environ,
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"petiole{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "ERL_EPMD_PORT": str(epmd),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1",
    }
    with (folder / "out").open("wb") as output:
        process = subprocess.Popen(
            [binary if Path(binary).exists() else BINARY],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def listens() -> bool:
        assert process.poll() is None, (folder / "out").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(listens, "rabbitmq-server listens", 90.0)
    yield f"amqp://guest:guest@127.0.0.1:{port}//"
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    subprocess.run(["epmd", "-port", str(epmd), "-kill"], env=environment, capture_output=True, check=False)


@pytest.fixture(scope="module")
def rabbit(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), PETIOLE_DRAIN_SECONDS=0) as site:
        site.environment |= {"PETIOLE_BROKER_URL": broker, "PETIOLE_REDIS_URL": site.url}
        site.app = App("petiole", set_as_current=False)
        site.app.conf.update(configuration(Settings(broker_url=broker, redis_url=site.url)))
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        yield site


def test_a_result_is_the_stream(rabbit: Site) -> None:
    result = rabbit.generate("hello", max_tokens=20, seed=1)
    assert rabbit.get(result)["token_ids"] == rabbit.tokens(result) == expected("hello", 1, 20)


def test_many_at_once(rabbit: Site) -> None:
    results = [rabbit.generate(f"r{i}", max_tokens=10, seed=i) for i in range(60)]
    for i, result in enumerate(results):
        assert rabbit.get(result)["token_ids"] == expected(f"r{i}", i, 10)


def test_a_bad_message_does_not_end_the_worker(rabbit: Site) -> None:
    with rabbit.app.connection_for_write() as connection:
        producer = connection.Producer(serializer="json")
        headers = {"task": "tasks.generate", "id": "bad", "timelimit": 5}
        producer.publish([[], {}, {}], routing_key="petiole", headers=headers)
    with pytest.raises(ValueError, match="timelimit"):
        rabbit.get(rabbit.app.AsyncResult("bad"))
    assert all(worker.alive() for worker in rabbit.workers)


def test_tasks_for_later_do_not_block_a_worker(rabbit: Site) -> None:
    """They wait in RabbitMQ: a consumer of a quorum queue cannot hold more than its first prefetch count."""
    for i in range(100):
        rabbit.generate(f"l{i}", max_tokens=1, submission={"countdown": 3600, "ignore_result": True})
    assert rabbit.get(rabbit.generate("behind", max_tokens=2, seed=1))["token_ids"] == expected("behind", 1, 2)


@pytest.mark.parametrize("countdown", [0.001, 0.5, 1.5])
def test_a_task_for_later_comes_then(rabbit: Site, countdown: float) -> None:
    submitted = time.time()
    eta = datetime.fromtimestamp(submitted + countdown, UTC)
    for submission in ({"countdown": countdown}, {"eta": eta}, {"eta": eta.isoformat()}):
        rabbit.get(rabbit.generate("later", max_tokens=2, seed=1, submission=submission))
        assert time.time() >= submitted + countdown


def test_the_length_of_a_queue(rabbit: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_QUEUE", "elsewhere")
    settings.cache_clear()
    try:
        assert queue_lengths(rabbit.app) == {"elsewhere": 0}
        rabbit.generate("waits", submission={"queue": "elsewhere"})
        eventually(lambda: queue_lengths(rabbit.app) == {"elsewhere": 1}, "it is counted")
    finally:
        settings.cache_clear()


def test_a_killed_workers_tasks_go_on_elsewhere(rabbit: Site) -> None:
    results = [rabbit.generate(f"k{i}", max_tokens=600, seed=i) for i in range(6)]
    for result in results:
        rabbit.streaming(result, 5)
    killed = time.monotonic()
    rabbit.workers[0].kill()
    for i, result in enumerate(results):
        assert rabbit.get(result)["token_ids"] == rabbit.tokens(result) == expected(f"k{i}", i, 600)
    assert time.monotonic() - killed < 30
