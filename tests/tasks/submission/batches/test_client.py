"""What a batch asks of the app."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import pytest
import redis

from petiole.tasks.app.application import make_app
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.client import BatchClient
from petiole.tasks.submission.batches.rows.output_lines import TaskOutcome
from tests.support.site import RedisServer

RESULT = '{"status": "SUCCESS", "result": {"text": "x"}, "task_id": "b-7", "traceback": null, "children": []}'
ALONE = """
from petiole.tasks.app.application import app
from petiole.tasks.submission.batches.client import BatchClient
print(BatchClient(app).task("tasks.generate").name, BatchClient(app).lowest_priority)
"""


def test_a_program_that_imports_nothing_but_batches_has_all_tasks() -> None:
    ran = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("tasks.generate 9\n", "")


def test_results_in_redis_are_read_many_in_a_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    app = make_app()
    try:
        exchange, ids = BatchClient(app), [f"b-{k}" for k in range(1200)]
        app.backend.client.set(app.backend.get_key_for_task("b-7"), RESULT)
        before = app.backend.client.info("commandstats").get("cmdstat_mget", {}).get("calls", 0)
        assert exchange.outcomes(ids) == {"b-7": TaskOutcome(result={"text": "x"})}
        stats = app.backend.client.info("commandstats")
        assert stats["cmdstat_mget"]["calls"] - before == 3
        assert "cmdstat_get" not in stats
        exchange.forget(ids)
        assert app.backend.client.keys("celery-task-meta-*") == []
    finally:
        app.close()
        server.kill()
        settings.cache_clear()


TWICE = """
from petiole.tasks.app.application import app
from petiole.tasks.submission.batches.client import BatchClient
from petiole.tasks.submission.batches.in_flight import RowInFlight
from petiole.tasks.submission.batches.rows.row_types import RowTask, RowWork
from petiole.tasks.submission.batches.rows.output_lines import OutputLine
from petiole.tasks.submission.batches.rows.sources import Row
exchange = BatchClient(app)
work = RowWork([RowTask("tasks.generate", {"prompt": "a"})], lambda _: OutputLine(True, {}))
for row in (0, 1):
    print([error for _, error in exchange.send([RowInFlight(Row(row, {}), work, [f"b-{row}"])])])
"""


def test_idle_workers_are_told_once_that_there_are_rows(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        with redis.Redis(unix_socket_path=str(server.socket)) as client, client.pubsub() as commands:
            commands.subscribe("/0.celery.pidbox")
            assert commands.get_message(timeout=10)["type"] == "subscribe"
            environment = {**os.environ, "PETIOLE_BROKER_URL": server.url}
            ran = subprocess.run(
                [sys.executable, "-c", TWICE], capture_output=True, text=True, check=False, env=environment
            )
            assert (ran.stdout, ran.stderr) == ("[None]\n[None]\n", "")
            client.publish("/0.celery.pidbox", "the end")
            command = json.loads(commands.get_message(timeout=10)["data"])
            assert json.loads(b64decode(command["body"]))["method"] == "ping"
            assert commands.get_message(timeout=10)["data"] == b"the end"
    finally:
        server.kill()


FAULTY = """
import sys
from petiole.tasks.app.application import app
from petiole.tasks.submission import bundles
from petiole.tasks.submission.batches.client import BatchClient
from petiole.tasks.submission.batches.in_flight import RowInFlight
from petiole.tasks.submission.batches.rows.row_types import RowTask, RowWork
from petiole.tasks.submission.batches.rows.output_lines import OutputLine
from petiole.tasks.submission.batches.rows.sources import Row
def fail(*tried):
    raise eval(sys.argv[1])
bundles.ensured = fail
work = RowWork([RowTask("tasks.generate", {"prompt": "a"})], lambda _: OutputLine(True, {}))
try:
    rows = [RowInFlight(Row(k, {}), work, [f"b-{k}"]) for k in (0, 1)]
    print([error for _, error in BatchClient(app).send(rows)])
except Exception as error:
    print("raised", repr(error))
"""


@pytest.mark.parametrize("fault", ["AttributeError('collecting')", "ValueError('zip')", "KeyError('x')"])
def test_a_fault_of_the_code_is_raised_and_no_row_is_blamed(tmp_path: Path, fault: str) -> None:
    """A batch that waited for it to pass would wait for ever; one that took it for a row's would write it down."""
    server = RedisServer(tmp_path)
    try:
        environment = {**os.environ, "PETIOLE_BROKER_URL": server.url}
        command = [sys.executable, "-c", FAULTY, fault]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (ran.stdout, ran.stderr) == (f"raised {fault}\n", "")
    finally:
        server.kill()
