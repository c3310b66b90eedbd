"""`petiole serve` as a process, and what it brings along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.gateway import Gateway
from tests.support.site import PATIENCE_S, REPOSITORY, RedisServer, eventually

NEVER = (
    "torch",
    "numpy",
    "tokenizers",
    "transformers",
    "petiole.gpu_worker",
    "petiole.cache",
    "petiole.tasks.worker",
)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_gateway_is_ready_while_redis_answers_and_ends_at_a_signal(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        with Gateway(tmp_path, PETIOLE_BROKER_URL=redis.url) as gateway:
            assert (status(f"{gateway.root}/health"), status(f"{gateway.root}/ready")) == (200, 200)
            redis.kill()
            assert (status(f"{gateway.root}/health"), status(f"{gateway.root}/ready")) == (200, 503)
            redis.start()
            eventually(lambda: status(f"{gateway.root}/ready") == 200, "ready again")
            assert gateway.stop(signal.SIGTERM) == 0
            assert " ERROR " not in gateway.output
    finally:
        redis.kill()


def test_a_signal_ends_a_gateway_that_has_just_said_that_it_serves() -> None:
    code = """
import gc, os, signal
from petiole.gateway.http import server
gc.freeze = lambda: os.kill(os.getpid(), signal.SIGTERM)  # called before the event loop begins
raise SystemExit(server.run("127.0.0.1", 0))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout.startswith("serving http")) == (0, True), done.stderr


def test_it_starts_without_an_error(tmp_path: Path) -> None:
    with Gateway(tmp_path) as gateway:
        assert status(f"{gateway.root}/health") == 200
        assert gateway.stop(signal.SIGTERM) == 0
    assert " ERROR " not in gateway.output


def test_an_address_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with Gateway(tmp_path) as gateway:
        command = [sys.executable, "-m", "petiole.tasks.commands.cli", "serve", "--port", str(gateway.port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert "in use" in done.stderr
    assert f"--port: must be an address that is free here, got 127.0.0.1:{gateway.port}: " in done.stderr


def test_it_needs_nothing_of_a_worker() -> None:
    code = "import json, sys, petiole.gateway.http.server; print(json.dumps(list(sys.modules)))"
    imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    brought = json.loads(imported.stdout)
    assert not [name for name in brought if f"{name}.".startswith(tuple(f"{one}." for one in NEVER))]
