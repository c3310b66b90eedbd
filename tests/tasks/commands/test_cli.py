"""`petiole`, as it is typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.app.application import App, make_app
from petiole.tasks.commands import cli, control as steering
from petiole.tasks.commands.terminal import error_text
from petiole.tasks.errors import Unavailable
from petiole.tasks.fleet import control, reports
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import WORKERS_KEY, stream_keys
from tests.support.site import RedisServer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def socket_of_a_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.socket
    server.kill()


@pytest.fixture
def client(socket_of_a_server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    monkeypatch.setenv("PETIOLE_REDIS_URL", f"unix://{socket_of_a_server}?db=0")
    settings.cache_clear()
    monkeypatch.setattr(App, "backend", make_app().backend)  # the app may have one already, for another Redis
    connections.streams().flushall()
    yield connections.streams()
    settings.cache_clear()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def petiole(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return petiole


def report(client: redis.Redis, worker: str, **more: object) -> None:
    reports.report(client, WorkerReport.model_validate({"worker": worker, **more}))


def test_settings_lists_every_variable_and_no_password(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", "redis://:secret@host/0")
    settings.cache_clear()
    status, out, _ = run("settings")
    settings.cache_clear()
    assert status == 0
    assert "redis://:***@host/0" in out
    assert "secret" not in out
    assert "PETIOLE_MAX_NUM_SEQS" in out


def test_a_misspelt_setting_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_MAX_NUM_SEQ", "3")
    assert "did you mean PETIOLE_MAX_NUM_SEQS?" in run("settings")[2]


def test_no_redis_is_one_clear_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_REDIS_URL", "redis://localhost:1/0")
    settings.cache_clear()
    status, _, err = run("status")
    settings.cache_clear()
    assert status == 1
    assert err.startswith("petiole: redis://localhost:1/0 is not available: ")
    assert err.count("\n") == 1


def test_a_url_that_nobody_chose_is_said_to_be_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DJANGO_SETTINGS_MODULE", "PETIOLE_BROKER_URL", "PETIOLE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    hint = ". That is the default: PETIOLE_BROKER_URL is not set here"
    settings.cache_clear()
    default = settings().broker_url
    for error in (Unavailable(default, "refused"), redis.ConnectionError("refused")):
        assert error_text(error) == f"{default} is not available: refused{hint}"
    assert hint not in error_text(Unavailable("redis://elsewhere:6379/0", "refused"))
    settings.cache_clear()


def test_in_a_django_project_the_line_says_how_to_read_its_settings(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PETIOLE_REDIS_URL", "redis://localhost:1/0")
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manage.py").touch()
    settings.cache_clear()
    said = run("status")[2]
    settings.cache_clear()
    assert said.endswith(". To read the settings of this Django project, set DJANGO_SETTINGS_MODULE\n")


def test_status_shows_who_works_and_who_is_lost(run: Run, client: redis.Redis) -> None:
    report(
        client,
        "b@host",
        version="1.2.3",
        model="petiole-tiny",
        slots=8,
        running=3,
        pages_total=100,
        pages_free=25,
        pages_cached=50,
    )
    lost = WorkerReport(worker="a@host", running=5).model_dump_json()
    client.hset(WORKERS_KEY, "a@host", f"{client.time()[0] - 60}.0 {lost}")
    status, out, _ = run("status")
    assert status == 0
    header, first, second, *_ = out.splitlines()
    assert re.fullmatch(r"a@host  lost +\d+ s ago", first), "no figures that are no longer so"
    assert header.split()[:3] == ["worker", "state", "version"]
    assert second.split()[:4] == ["b@host", "ready", "1.2.3", "petiole-tiny"]
    assert "25%" in second


def test_status_as_json(run: Run, client: redis.Redis) -> None:
    report(client, "a@host", running=2, something_new=1)
    status, out, _ = run("status", "--json")
    (worker,) = json.loads(out)["workers"]
    assert (status, worker["worker"], worker["running"], worker["lost"]) == (0, "a@host", 2, False)
    assert worker["something_new"] == 1


def test_a_worker_that_ended_is_not_shown_and_a_dead_one_is_forgotten(run: Run, client: redis.Redis) -> None:
    report(client, "a@host")
    reports.withdraw(client, "a@host")
    client.hset(WORKERS_KEY, "b@host", f"{client.time()[0] - 4000}.0 {{}}")
    status, out, _ = run("status")
    assert (status, out.splitlines()[0]) == (1, "No worker is running.")
    reports.forget_lost(client)
    assert client.hlen(WORKERS_KEY) == 0


def test_the_fleet_view_has_a_time_to_live(client: redis.Redis) -> None:
    report(client, "a@host")
    assert 0 < client.ttl(WORKERS_KEY) <= reports.FORGOTTEN_AFTER_S


def test_cancel_reaches_running_and_future_deliveries(
    run: Run, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        type(control.celery_app.control),
        "revoke",
        lambda self, task_id, terminate: revoked.append((task_id, terminate)),
    )
    client.hset(stream_keys("t1").state, "attempt", 1)
    assert run("cancel", "t1", "t2")[:2] == (
        1,
        "t1: cancelled\nt2: not known to any worker; cancelled if it waits in a queue\n",
    )
    assert revoked == [("t1", True), ("t2", True)]
    assert client.hget(stream_keys("t1").asked, "cancel") == b"1"
    for task_id in ("t1", "t2"):
        assert 0 < client.ttl(stream_keys(task_id).asked) <= control.CANCELLED_FOR_S


def test_a_cancelled_task_may_wait_for_longer_than_a_stream_is_kept(client: redis.Redis) -> None:
    keys = stream_keys("t")
    control.flag_cancel("t")
    assert client.ttl(keys.asked) > 86_400
    client.hset(keys.state, "done", "{}")
    client.expire(keys.asked, 10)
    control.flag_cancel("t")
    assert 10 < client.ttl(keys.asked) <= settings().stream_ttl_s


def test_a_task_that_ends_while_it_is_cancelled_is_forgotten_with_its_stream(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the state was read, and before the flag is set."""
    keys, executed = stream_keys("t"), redis.client.Pipeline.execute
    client.hset(keys.state, "attempt", 1)

    def execute(pipe: Any, *args: Any, **options: Any) -> Any:
        answers = executed(pipe, *args, **options)
        if not client.hexists(keys.state, "done"):
            client.hset(keys.state, "done", "{}")
            client.expire(keys.asked, 10)
        return answers

    monkeypatch.setattr(redis.client.Pipeline, "execute", execute)
    control.flag_cancel("t")
    assert client.hget(keys.asked, "cancel") == b"1"
    assert 0 < client.ttl(keys.asked) <= settings().stream_ttl_s


def test_who_may_only_read_sees_the_fleet_after_a_worker_has_died(client: redis.Redis) -> None:
    reports.report(client, WorkerReport(worker="alive"))
    client.hset(WORKERS_KEY, "dead", b'1000.000000 {"worker": "dead"}')
    client.hset(WORKERS_KEY, "strange", "no report")
    client.acl_setuser(
        "reader", enabled=True, nopass=True, keys=["*"], categories=["-@all", "+@read"], commands=["+time"]
    )
    options = client.connection_pool.connection_kwargs
    reader = redis.Redis(unix_socket_path=options["path"], db=options.get("db", 0), username="reader", password="")
    try:
        assert [worker.worker for worker in reports.workers(reader)] == ["alive"]
        assert client.hexists(WORKERS_KEY, "dead")
    finally:
        reader.close()
        client.acl_deluser("reader")
    reports.forget_lost(client)
    assert set(client.hkeys(WORKERS_KEY)) == {b"alive", b"strange"}


def test_a_damaged_state_holds_up_no_other_cancel(client: redis.Redis) -> None:
    client.set(stream_keys("damaged").asked, "somebody's")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        control.flag_cancel("damaged", "t")
    assert client.hget(stream_keys("t").asked, "cancel") == b"1"


def test_what_has_ended_cannot_be_cancelled(run: Run, client: redis.Redis) -> None:
    client.set("celery-task-meta-t", json.dumps({"task_id": "t", "status": "SUCCESS", "result": {}}))
    assert run("cancel", "t")[:2] == (0, "t: has ended (SUCCESS)\n")
    assert not client.exists(stream_keys("t").asked)


def test_drain_asks_known_workers_only(run: Run, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def shutdown(self: object, destination: list[str]) -> None:
        asked.extend(destination)
        reports.withdraw(client, destination[0])

    monkeypatch.setattr(type(control.celery_app.control), "shutdown", shutdown)
    report(client, "a@host")
    assert run("drain", "b@host") == (1, "", "petiole: no such worker: b@host\n")
    assert run("drain", "a@host", "--wait", "5") == (0, "a@host: drains\na@host: gone after 0 s\n", "")
    assert asked == ["a@host"]


def test_a_drain_that_takes_too_long_says_who_is_left(
    run: Run, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(control.celery_app.control), "shutdown", lambda self, destination: None)
    monkeypatch.setattr(steering, "POLL_S", 0.01)
    report(client, "a@host")
    left = "petiole: still there: a@host\n"
    assert run("drain", "a@host", "--wait", "0.1") == (1, "a@host: drains\n", left)


def test_stream_prints_what_the_task_said(run: Run, client: redis.Redis) -> None:
    delta = {"task_id": "t", "attempt": 1, "index": 0, "token_ids": [1], "text": "Hello", "finish_reason": "stop"}
    client.rpush(stream_keys("t").log, json.dumps(delta))
    assert run("stream", "t")[:2] == (0, "Hello\n")
    shown = json.loads(run("stream", "t", "--json")[1])
    assert shown == dict.fromkeys(StreamDelta.model_fields) | delta


def test_stream_of_a_task_that_nobody_knows_says_so_and_ends_when_it_is_told_to(
    run: Run, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "UNKNOWN_AFTER_S", 0.0)
    status, out, err = run("stream", "t", "--timeout", "1.5")
    assert (status, out) == (1, "")
    assert err == "petiole: t is not known to any worker yet; waiting\npetiole: task t: no delta for 1.5 s\n"


def test_bare_petiole_prints_its_help(run: Run) -> None:
    status, out, _ = run()
    assert status == 0
    assert out.startswith("usage: petiole ")


def test_version(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "installed", lambda name: "1.2.3")
    with pytest.raises(SystemExit) as ended:
        run("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == "petiole 1.2.3\n"


def test_petiole_is_a_program() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "petiole.tasks.commands.cli", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("settings", "demo", "status", "cancel", "drain", "stream", "bench"):
        assert command in shown.stdout
