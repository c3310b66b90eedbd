"""A Redis that is watched by Sentinel: a failover is a restart at another address, and nobody has to care."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest

from petiole.tasks.errors import Unavailable
from petiole.tasks.servers import embedded
from petiole.tasks.settings import settings
from petiole.tasks.streams.readers import AsyncStream, Stream
from tests.e2e import test_batch, test_detached_batch
from tests.e2e.conftest import WatchedSite
from tests.support.certificates import Certificates, server_with_tls
from tests.support.client import client
from tests.support.fake_engine import expected
from tests.support.nursery import petiole
from tests.support.scraping import exporting
from tests.support.site import REPOSITORY, Site, eventually
from tests.support.watched import PASSWORD, SENTINEL_PASSWORD, Watched

LONG = 2000
LATEST_S = 180.0
"""A batch waits for up to thirty seconds before it sends again what a failover may have lost."""
SERVERS = sorted({shutil.which("redis-server") or embedded.server_binary(), embedded.server_binary()})

PRODUCER = """
import json
from petiole.tasks import generate
from petiole.tasks.errors import Unavailable

try:
    print(json.dumps(generate.delay(prompt="hello", max_tokens=3, seed=1).get(timeout=60)["token_ids"]))
except Unavailable as error:
    print(json.dumps({"unavailable": str(error)}))
"""


def get(site: Site, task: Any) -> Any:
    """What a caller does that outlives a failover: one that takes more than three seconds is `Unavailable`."""

    def asked() -> Any:
        with suppress(Unavailable):
            return site.get(task)

    return eventually(asked, f"the result of {task.id}")


def read(site: Site, task: Any) -> list[int]:
    with Stream(task, app=site.app) as deltas:
        return [token for delta in deltas for token in delta.token_ids]


async def aread(site: Site, task: Any) -> list[int]:
    stream = AsyncStream(task, app=site.app)
    return [token async for delta in stream for token in delta.token_ids]


async def aread_all(site: Site, tasks: list[Any]) -> list[list[int]]:
    return await asyncio.gather(*(aread(site, task) for task in tasks))


@pytest.mark.parametrize(
    ("planned", "server", "tls"),
    [
        (True, SERVERS[-1], False),
        *((False, server, False) for server in SERVERS),
        (False, "", True),
        (True, "", True),
    ],
)
def test_a_failover_that_sentinel_makes_is_survived(
    watched_site: WatchedSite, tmp_path: Path, planned: bool, server: str, tls: bool
) -> None:
    """In mid-generation: callers wait for results, others read streams, one of the sentinels is dead. A master
    that is to be demoted takes no writes once it has no replica; one that was killed answers nobody."""
    secured = {"tls": Certificates(tmp_path / "tls"), "binary": server_with_tls()} if tls else {"binary": server}
    site = watched_site(*(("--min-replicas-to-write", "1") if planned else ()), **secured)
    watched, worker = site.server, site.worker()
    watched.kill_sentinel(0)
    site.get(site.generate("before", max_tokens=1))  # this process listens on the old master now
    results = [site.generate(f"r{i}", max_tokens=LONG, seed=i) for i in range(12)]
    with ThreadPoolExecutor(2 * len(results) + 1) as threads:
        waiting = [threads.submit(get, site, result) for result in results]
        reading = [threads.submit(read, site, result) for result in results]
        loop = threads.submit(asyncio.run, aread_all(site, results))
        site.streaming(results[7], 50)
        eventually(watched.in_step, "replicated")
        old = watched.master()
        if planned:
            watched.fail_over()
        else:
            old.kill()
        for i, result in enumerate(results):
            assert waiting[i].result()["token_ids"] == expected(f"r{i}", i, LONG)
            assert reading[i].result() == loop.result()[i] == expected(f"r{i}", i, LONG)
            eventually(lambda result=result: site.app.AsyncResult(result.id).state == "SUCCESS", "stored")
    assert watched.master() is not old
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    for i, result in enumerate(results):
        assert site.tokens(result) == expected(f"r{i}", i, LONG)
    assert site.get(site.generate("after", max_tokens=3, seed=1))["token_ids"] == expected("after", 1, 3)
    assert worker.alive()
    assert shows_no_password(worker.output)


SUBMISSION = """
import os
os.environ["PETIOLE_CONFIRM_TIMEOUT_S"] = "10"  # a busy machine is no replica that is away
from petiole import Unconfirmed

try:
    generate.delay(prompt="hello", max_tokens=3, seed=1, task_id="mine", confirm=CONFIRM)
    print(json.dumps("sent"))
except Unconfirmed:
    print(json.dumps("unconfirmed"))
"""


def failed_over(watched: Watched, to: Any) -> int:
    """Kill the master at once. Returns how many tasks wait in the queue after the failover."""
    watched.master().kill()
    eventually(lambda: watched.master() is to and watched.role(to) == "master", "the failover")
    waiting = watched.client(to).llen("petiole")
    assert isinstance(waiting, int)
    return waiting


def test_a_submission_that_is_confirmed_survives_the_primary(watched_site: WatchedSite) -> None:
    site = watched_site()
    assert client(site, SUBMISSION.replace("CONFIRM", "1")) == "sent"
    assert failed_over(site.server, site.server.servers[1]) == 1


@pytest.mark.parametrize(("confirm", "said"), [(0, "sent"), (1, "unconfirmed")])
def test_only_a_confirmed_submission_is_known_to_survive(
    watched_site: WatchedSite, confirm: int, said: str
) -> None:
    """The replica is cut off. Without confirmation the submission seems to be made, and is lost. With it the
    caller is told, and submits again."""
    site = watched_site()
    watched, replica = site.server, site.server.servers[1]
    cut_off = watched.client(replica)
    cut_off.config_set("masterauth", "wrong")
    cut_off.execute_command("CLIENT", "KILL", "TYPE", "master")
    eventually(lambda: cut_off.info("replication")["master_link_status"] == "down", "it is cut off")
    assert client(site, SUBMISSION.replace("CONFIRM", str(confirm))) == said
    old = watched.master()
    assert failed_over(watched, replica) == 0
    cut_off.config_set("masterauth", PASSWORD)
    watched.bring_back(old)
    eventually(watched.in_step, "there is a replica again")
    assert client(site, SUBMISSION.replace("CONFIRM", "1")) == "sent"
    site.worker()
    assert get(site, site.app.AsyncResult("mine"))["token_ids"] == expected("hello", 1, 3)


def test_without_sentinels_everybody_says_so_and_a_worker_waits(watched_site: WatchedSite) -> None:
    site = watched_site()
    for number in range(3):
        site.server.kill_sentinel(number)
    worker = site.start_worker()
    eventually(lambda: "no connection to sentinel://:***@127.0.0.1" in worker.output, "one clear line")
    assert "refused" in produce()["unavailable"]
    assert "Traceback" not in worker.output
    assert shows_no_password(worker.output)
    for number in range(3):
        site.server.start_sentinel(number)
    worker.ready()
    assert produce() == expected("hello", 1, 3)
    asked = site.app.control.inspect(destination=[worker.node])
    for question in (asked.stats, asked.conf):
        assert shows_no_password(json.dumps(eventually(question, "it tells of itself", 15.0)))


def test_a_name_that_no_sentinel_knows_is_named(
    watched_site: WatchedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = watched_site()
    monkeypatch.setenv("PETIOLE_SENTINEL_MASTER", "another")
    line = "the sentinels name no master 'another' (PETIOLE_SENTINEL_MASTER): 127.0.0.1:"
    worker = site.start_worker()
    eventually(lambda: line in worker.output, "one clear line")
    assert "Traceback" not in worker.output
    assert line in produce()["unavailable"]
    ran = cli("status")
    assert ran.returncode == 1
    assert ran.stderr.startswith("petiole: sentinel://")
    assert line in ran.stderr


def test_everybody_speaks_tls(watched_site: WatchedSite, tmp_path: Path) -> None:
    """A worker, a producer with kombu's own transport, and the command line."""
    site = watched_site(tls=Certificates(tmp_path / "tls"), binary=server_with_tls())
    site.worker()
    assert produce() == expected("hello", 1, 3)
    assert "w0@test" in cli("status").stdout
    with exporting(site) as scrape:
        assert scrape()["petiole_redis_up", ""] == 1


def test_certificates_are_checked_on_both_sides(
    watched_site: WatchedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = watched_site(tls=Certificates(tmp_path / "tls"), binary=server_with_tls())
    url, others = site.environment["PETIOLE_BROKER_URL"], Certificates(tmp_path / "others")
    site.use(url.replace(quote_plus(site.server.tls.ca), quote_plus(others.ca)))
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.environment["PETIOLE_BROKER_URL"])
    line = "certificate verify failed"
    worker = site.start_worker()
    eventually(lambda: line in worker.output, "the worker says why, and waits")
    assert "Traceback" not in worker.output
    assert line in produce()["unavailable"]
    assert line in cli("status").stderr
    monkeypatch.setenv("PETIOLE_BROKER_URL", url.partition("&")[0])  # the CA, and no certificate of one's own
    assert "the sentinels name no master" in produce()["unavailable"]


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return petiole(*arguments)


def produce() -> Any:
    """A web app's process, with kombu's own transport."""
    command = [sys.executable, "-c", PRODUCER]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert shows_no_password(ran.stdout + ran.stderr)
    return json.loads(ran.stdout)


def shows_no_password(text: str) -> bool:
    return not any(secret in text for secret in (PASSWORD, SENTINEL_PASSWORD, settings().broker_url.split("@")[0]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in its client", "detached"])
def test_a_batch_goes_on_at_the_new_primary(watched_site: WatchedSite, tmp_path: Path, how: str) -> None:
    """With the lease that workers have by default, which outlasts a failover: a shorter one would end each runner
    on a machine that is busy enough."""
    count = 300
    site = watched_site("--min-replicas-to-write", "1")
    site.worker(PETIOLE_FAKE_STEP_MS=20, PETIOLE_VISIBILITY_TIMEOUT_S=15)
    folder = tmp_path / "batch"
    folder.mkdir()
    rows = test_batch.rows_in(folder, count, tokens=20)
    ran = None
    if how == "detached":
        test_detached_batch.detached(site, folder)
        eventually(lambda: test_detached_batch.written(folder) > 0, "some rows have ended")
    else:
        ran = test_batch.start(site, rows, "-o", folder / "out.jsonl")
        eventually(lambda: test_batch.journaled(folder) > 10, "some rows have ended")
    old = site.server.master()
    site.server.fail_over()
    eventually(lambda: site.server.master() is not old, "the failover")
    assert not (folder / "out.jsonl").exists(), "it ended before"
    if ran is not None:
        _, said = ran.communicate(timeout=LATEST_S)
        assert ran.returncode == 0, said
    eventually((folder / "out.jsonl").exists, "the batch has ended", LATEST_S)
    test_batch.check(folder, count, tokens=20)
