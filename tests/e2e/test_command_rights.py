"""Every command of the product runs under a user of the docs, and Redis refuses nothing to any of them."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.result import AsyncResult

from petiole.tasks.commands import cli
from petiole.tasks.wire.keys import QUARANTINE_KEY
from tests.support.rights import BINARIES, SECRET, binary_of, grant, grant_gateway
from tests.support.site import NO_DISKS, REPOSITORY, Site, Worker
from tests.support.trials import rest

WITHOUT_REDIS = {"settings", "demo", "up", "plan", "trace", "bench"}
"""Commands that use none, or one of their own."""

CALLS: dict[str, tuple[str, list[str]]] = {
    "replay": ("petiole", ["ASIDE"]),
    "task": ("petiole", ["TASK"]),
    "status": ("monitor", ["--once"]),
    "doctor": ("monitor", ["--json"]),
    "models": ("monitor", []),
    "usage": ("monitor", ["--tasks"]),
    "metrics": ("monitor", ["--host", "127.0.0.1", "--port", "0"]),
    "stream": ("webapp", ["TASK"]),
    "chat": ("webapp", ["--max-tokens", "3"]),
    "cancel": ("webapp", ["TASK"]),
    "batch": ("webapp", ["ROWS", "-o", "OUTPUT"]),
    "keys": ("gateway", ["add", "acme"]),
    "serve": ("gateway", ["--host", "127.0.0.1", "--port", "0"]),
    "pause": ("operator", ["WORKER"]),
    "resume": ("operator", ["WORKER"]),
    "reload": ("operator", ["fake", "WORKER"]),
    "drain": ("operator", ["WORKER"]),
}
"""By command, in the order of their turns: whose it is, and its arguments."""

SERVERS = {"metrics": r"serving http\S+", "serve": r"http\S+"}
"""Commands that go on until they are stopped, and what they print once they serve."""


def test_every_command_has_a_user() -> None:
    (commands,) = (action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(commands.choices) == WITHOUT_REDIS | CALLS.keys()


@pytest.fixture(scope="module", params=rest(BINARIES))
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Worker]]:
    binary = binary_of(request.param) or pytest.skip(f"{request.param}: there is none here")
    with Site(tmp_path_factory.mktemp("guarded"), binary=binary, PETIOLE_DRAIN_SECONDS=0, **NO_DISKS) as site:
        grant(site.redis)
        grant_gateway(site.redis)
        url = f"redis+socket://petiole:{SECRET}@{site.server.socket}?virtual_host=0"
        worker = site.worker(gossip=True, PETIOLE_BROKER_URL=url, PETIOLE_CONTROL_EXCHANGE="operators")
        yield site, worker


def test_redis_refuses_no_command_of_the_product(guarded: tuple[Site, Worker], tmp_path: Path) -> None:
    site, worker = guarded
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"row {n}", "max_tokens": 3}) + "\n" for n in range(20)))
    task = site.generate("a stream", max_tokens=4)
    site.get(task)
    aside = put_aside(site)
    words = {
        "TASK": task.id,
        "ASIDE": aside.id,
        "WORKER": worker.node,
        "ROWS": str(rows),
        "OUTPUT": str(tmp_path / "results.jsonl"),
    }
    refused = {"worker": refusals(site)}
    for name, (user, arguments) in CALLS.items():
        called = [name, *(words.get(word, word) for word in arguments)]
        said = run(site, user, called, until=SERVERS.get(name))
        assert "NOPERM" not in said, said
        refused[name] = refusals(site)
    assert refused == {name: [] for name in ("worker", *CALLS)}
    assert len(site.get(aside)["token_ids"]) == 3


def refusals(site: Site) -> list[str]:
    """What Redis has refused since the last call, or since its start."""
    entries = site.redis.acl_log()
    site.redis.acl_log_reset()
    return [f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in entries]


def put_aside(site: Site) -> AsyncResult:
    """A task whose message lies in quarantine. It was sent to a queue that no worker has."""
    task = site.generate("late", max_tokens=3, submission={"queue": "petiole.aside"})
    message = site.redis.rpop("petiole.aside").decode()
    entry = {"at": 1.0, "queue": "petiole", "reason": "x", "task_id": task.id, "message": message}
    site.redis.lpush(QUARANTINE_KEY, json.dumps(entry))
    return task


def run(site: Site, user: str, words: list[str], until: str | None) -> str:
    """What a command prints that a user calls; with `until` it is stopped once it has printed that."""
    url = f"redis+socket://{user}:{SECRET}@{site.server.socket}?virtual_host=0"
    environment = {**os.environ, **site.environment, "PETIOLE_BROKER_URL": url}
    if user == "operator":
        environment["PETIOLE_CONTROL_EXCHANGE"] = "operators"
    with subprocess.Popen(
        [sys.executable, "-m", "petiole.tasks.commands.cli", *words],
        env=environment,
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        if until is None:
            said, _ = child.communicate("hello\n" if words[0] == "chat" else None, timeout=120)
            assert child.returncode == 0, (words, said)
            return said
        assert child.stdout is not None
        said = ""
        try:
            while not re.search(until, said):
                line = child.stdout.readline()
                assert line, (words, said)
                said += line
        finally:
            child.send_signal(signal.SIGTERM)
        return said + child.stdout.read()
