"""A queue that no worker serves, a misspelt one, a misspelt setting: whoever waits learns so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from petiole.tasks.fleet import availability, reports
from petiole.tasks.fleet.reports import WorkerReport
from tests.support import nursery
from tests.support.client import client
from tests.support.site import REPOSITORY, Site, eventually

LOGGED = """
import logging, threading, time
from celery.exceptions import TimeoutError as GaveUp
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)

def until_said(waiting):
    while not said:
        next(waiting)

def heartbeats(reader):
    for delta in reader:
        assert delta.is_heartbeat
        yield
"""
MISSING = "no worker serves queue 'petiol'; queues with workers: petiole (1)"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as site:
        site.worker()
        eventually(lambda: reports.workers(site.redis), "it has reported")
        yield site


def test_who_reads_a_stream_of_a_misspelt_queue_is_warned_once_and_may_keep_its_client(served: Site) -> None:
    code = f"""{LOGGED}
result = generate.apply_async(kwargs={{"prompt": "hello"}}, queue="petiol")
until_said(heartbeats(stream(result, heartbeat_s=1)))
print(json.dumps(said))
"""
    assert client(served, code) == [MISSING]


def test_so_is_who_reads_it_with_asyncio(served: Site) -> None:
    code = f"""{LOGGED}
async def read():
    async for delta in generate.astream(prompt="hello", queue="petiol", heartbeat_s=1):
        assert delta.is_heartbeat
        if said:
            break

asyncio.run(read())
print(json.dumps(said))
"""
    assert client(served, code) == [MISSING]


WAITED_FOR = {
    "the result": 'generate.apply_async(kwargs={"prompt": "hello"}, queue="petiol")',
    "a group": """group(
    generate.s(prompt="hello").set(queue="petiol"), generate.s(prompt="hello", max_tokens=1)
).apply_async()""",
}


@pytest.mark.parametrize("waited_for", WAITED_FOR.values(), ids=WAITED_FOR)
def test_so_is_who_waits_for_the_result_and_for_a_group(served: Site, waited_for: str) -> None:
    code = f"""{LOGGED}
from celery import group

waited_for = {waited_for}
while not said:
    try:
        waited_for.get(timeout=5)
    except GaveUp:
        pass
print(json.dumps(said))
"""
    assert client(served, code) == [MISSING]


def test_of_a_task_that_is_known_by_its_id_it_is_said_if_there_is_no_worker_at_all(own_site: Site) -> None:
    code = f"""{LOGGED}
until_said(heartbeats(stream(generate.delay(prompt="hello").id, heartbeat_s=1)))
print(json.dumps(said))
"""
    missing = "no worker serves any queue; queues with workers: none"
    assert client(own_site, code) == [missing]


def test_require_worker(served: Site) -> None:
    code = """
from petiole.tasks import NoWorker
result = generate.apply_async(kwargs={"prompt": "hello", "max_tokens": 2}, require_worker=True)
reason = result.get(timeout=60)["finish_reason"]
try:
    generate.apply_async(kwargs={"prompt": "hello"}, queue="petiol", require_worker=True)
except NoWorker as error:
    print(json.dumps([reason, str(error)]))
"""
    said = f"require_worker: a worker must have been seen within 6 s, but {MISSING}"
    assert client(served, code) == ["length", said]
    assert served.redis.llen("petiol") <= 4  # of the other tests: this one submits nothing


def test_who_may_not_read_the_reports_cannot_require_a_worker(served: Site) -> None:
    rights = ("~*", "&*", "+@all", "resetkeys", "~petiole:{*", "~petiole", "~celery*", "~_kombu*")
    served.redis.execute_command("ACL", "SETUSER", "webapp", "on", ">secret", *rights)
    code = """
try:
    generate.apply_async(kwargs={"prompt": "hello"}, require_worker=True)
except InvalidRequest as error:
    print(json.dumps([error.field, error.limit]))
"""
    elsewhere = Site.__new__(Site)
    url = f"unix://webapp:secret@{served.server.socket}?db=0"
    elsewhere.environment = {**served.environment, "PETIOLE_REDIS_URL": url}
    assert client(elsewhere, code) == ["require_worker", "needs the right to read petiole:workers"]


def test_who_gives_up_after_a_moment_is_warned_before(served: Site) -> None:
    said = petiole(served, "chat", "--queue", "petiol", "--timeout", "2", typed="hello\n").stderr.splitlines()
    assert said[0] == MISSING
    assert re.fullmatch(r"petiole: task \S+: no delta for 2 s", said[-1])


def petiole(site: Site, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    if not typed:
        return nursery.petiole(*arguments, **site.environment)
    return subprocess.run(
        [sys.executable, "-m", "petiole.tasks.commands.cli", *arguments],
        env={**os.environ, **site.environment},
        cwd=REPOSITORY,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
    )


def test_status_shows_queues_also_without_any_worker(own_site: Site) -> None:
    for priority in (0, 0, 3):
        own_site.generate("hello", submission={"priority": priority})
    shown = petiole(own_site, "status", "--once")
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[0] == "No worker is running."
    assert shown.stdout.splitlines()[-1].split() == ["petiole", "3", "0:", "2,", "3:", "1", "0"]
    own_site.environment["PETIOLE_VISIBILITY_TIMEOUT_S"] = "2"
    (queue,) = json.loads(petiole(own_site, "status", "--json").stdout)["queues"]
    assert queue == {
        "queue": "petiole",
        "waiting": 3,
        "by_priority": {"0": 2, "3": 1, "6": 0, "9": 0},
        "workers": 0,
        "known": True,
    }


def test_status_counts_the_workers_of_each_queue(served: Site) -> None:
    def queues() -> dict[str, Any]:
        shown = json.loads(petiole(served, "status", "--json").stdout)
        return {queue["queue"]: queue["workers"] for queue in shown["queues"]}

    assert eventually(lambda: queues() == {"petiole": 1}, "the worker's queue")


def test_a_producer_is_told_of_variables_that_nobody_reads(served: Site) -> None:
    site_of_the_default = {name: value for name, value in served.environment.items() if "BROKER" not in name}
    code = f"""{LOGGED}
import os
os.environ["PETIOLE_QUEU"] = "x"
os.environ["CELERY_BROKER_URL"] = "redis://other/0"
for _ in range(2):
    try:
        generate.apply_async(kwargs={{"prompt": "hello"}}, retry=False)
    except Exception:
        pass
print(json.dumps(said))
"""
    misspelt = "PETIOLE_QUEU is not a setting; did you mean PETIOLE_QUEUE?"
    assert client(served, code) == [misspelt]  # PETIOLE_BROKER_URL is set: the other is the user's app's
    unset = Site.__new__(Site)
    unset.environment = {**site_of_the_default, "PETIOLE_REDIS_URL": served.url}
    ignored_urls = (
        "CELERY_BROKER_URL is ignored, in the environment and on the command line: use PETIOLE_BROKER_URL"
    )
    assert client(unset, code)[:2] == [misspelt, ignored_urls]


# ------------------------------------------------------------ the rule


def seen(*served: tuple[list[str], float]) -> list[WorkerReport]:
    return [WorkerReport(worker=str(n), queues=queues, age_s=age) for n, (queues, age) in enumerate(served)]


def test_what_is_said() -> None:
    assert availability.lack(seen((["a"], 1.0)), "a") is None
    assert availability.lack(seen((["a"], 1.0)), None) is None
    assert (
        availability.lack(seen((["a"], 12.4), (["a"], 100.0), (["b", "c"], 1.0), (["c"], 2.0)), "a")
        == "no worker has served queue 'a' for 12 s; queues with workers: b (1), c (2)"
    )
    assert (
        availability.lack(seen((["a"], 12.4)), None)
        == "no worker has served any queue for 12 s; queues with workers: none"
    )


def test_workers_that_take_from_no_queue_are_named() -> None:
    workers = seen(([], 1.0), ([], 1.0), ([], 9.0))
    silenced = [worker.model_copy(update={"state": "silenced"}) for worker in workers]
    named = "(0, 1: silenced until `add_consumer` names a queue)"
    assert availability.lack(silenced, "a") == f"no worker serves queue 'a' {named}; queues with workers: none"
    assert availability.lack([*silenced, *seen((["a"], 1.0))], "a") is None


def test_a_queue_whose_workers_are_all_paused_is_said() -> None:
    paused = [worker.model_copy(update={"state": "paused"}) for worker in seen((["a"], 1.0), (["a", "b"], 1.0))]
    assert availability.pause(paused, "a") == "all workers of queue 'a' are paused: 0, 1"
    assert availability.pause(paused, None) == "all workers of every queue are paused: 0, 1"
    assert availability.pause([*paused, *seen((["a"], 1.0))], "a") is None
    assert availability.pause([*paused, *seen((["a"], 12.4))], "a") is not None, "that one is lost"
    assert availability.pause(paused, "c") is None, "which `lack` says"


def test_where_nobody_may_look_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Event()

    def refused() -> list[WorkerReport]:
        looked.set()
        raise PermissionError("NOPERM")

    monkeypatch.setattr(reports, "workers", refused)
    watch = availability.QueueWatch(["petiole"])
    watch._look_at = 0.0
    watch.silent()
    assert looked.wait(60)
    assert caplog.records == []


def test_an_outage_is_told_once_however_many_wait(caplog: pytest.LogCaptureFixture) -> None:
    lookout, none, one = availability.AvailabilityMonitor(), seen(), seen((["a"], 1.0))
    for workers in (none, none, one, none, none):
        for _reader in range(1000):
            lookout.judge(workers, ["a"])
    assert [record.message for record in caplog.records] == [
        "no worker serves queue 'a'; queues with workers: none"
    ] * 2
