"""What the demos share: Redis and a worker on one machine.

The Redis is an embedded one, and the worker is that of `celery -A tasks worker`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import petiole
from petiole.tasks import celery_app
from petiole.tasks.errors import PetioleError
from petiole.tasks.servers import embedded
from petiole.tasks.servers._supervisor import die_with
from petiole.tasks.settings import IN_FILES, PREFIX, settings

START_TIMEOUT_S = 120.0
DELTA_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
_LOG_LINES = 15


@contextlib.contextmanager
def running(model: str) -> Iterator[None]:
    """Run Redis and a worker of the demo's own until this context ends."""
    began = time.monotonic()
    settle(model)
    try:
        print(f"Starting Redis and a worker with {model} ...", flush=True)
        with worker():
            print(f"Ready after {time.monotonic() - began:.1f} s.", flush=True)
            yield
    finally:
        embedded.release()


def settle(model: str) -> None:
    """From now on this process has the demo's settings."""
    os.environ.update({**environment(), "PETIOLE_MODEL": model})
    settings.cache_clear()


def environment() -> dict[str, str]:
    """The demo's settings. It uses a separate queue, because another worker may share the embedded Redis."""
    return {
        **{f"{PREFIX}{name.upper()}_FILE": "" for name in IN_FILES},
        "PETIOLE_BROKER_URL": "embedded://",
        "PETIOLE_REDIS_URL": "",
        "PETIOLE_RESULT_BACKEND": "",
        "PETIOLE_QUEUE": f"petiole-demo-{os.getpid()}",
        "PETIOLE_MODEL": "petiole-tiny",
        "PETIOLE_DRAIN_SECONDS": "0",
    }


@contextlib.contextmanager
def worker(
    name: str = "demo", patience_s: float = START_TIMEOUT_S, /, **given: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a worker and wait until it is ready. Yields its name and process. On Linux it dies with the caller."""
    if settings().broker_url.startswith("embedded:"):
        embedded.socket_path()
    if settings().engine == "vllm":
        patience_s = max(patience_s, settings().vllm_start_s)
    name = f"{name}-{os.getpid()}@localhost"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "petiole", "worker", "--loglevel=INFO", "-n", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the demo handles Ctrl-C and stops the worker
            preexec_fn=die_with(os.getpid()),
            env={**os.environ, **given, "PYTHONPATH": python_path()},
        )
        try:
            wait_until_ready(process, name, log, patience_s)
            yield name, process
        finally:
            stop(process)


def python_path(*more: str) -> str:
    """A PYTHONPATH for subprocesses to import this `petiole` package."""
    here = str(Path(petiole.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [*more, here, os.environ.get("PYTHONPATH")]))


def wait_until_ready(process: subprocess.Popen[bytes], name: str, log: Any, patience_s: float) -> None:
    """A worker replies to a ping once its model is loaded. Raises PetioleError."""
    give_up_at = time.monotonic() + patience_s
    while not celery_app.control.ping(destination=[name], timeout=0.25):
        ended = process.poll() is not None
        if ended or time.monotonic() > give_up_at:
            log.seek(0)
            tail = b"\n".join(log.read().splitlines()[-_LOG_LINES:]).decode(errors="replace")
            why = f"ended with status {process.returncode}" if ended else f"is not ready after {patience_s:.0f} s"
            raise PetioleError(f"the worker {why}; its log ends with:\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
