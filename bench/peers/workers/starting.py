"""Celery workers as people write them today, started beside ours on the same embedded Redis.

Each function waits until its worker answers, and yields a task that takes a prompt and a number of tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.harness.checkpoints.decoders import Shape

READY_S = 600.0
SERVER_CALLS = 8  # calls to the model server that a worker keeps open


@contextmanager
def plain(model: str, shape: Shape, threads: int) -> Iterator[Any]:
    """transformers in the worker process, one prompt per task."""
    settings = {"PLAIN_MODEL": folder(model), "PLAIN_DTYPE": shape.dtype, "PLAIN_THREADS": str(threads)}
    with worker(settings, "--concurrency", "1") as app:
        task = app.tasks["plain.generate"]
        task.delay([1, 2, 3], 2).get(timeout=READY_S)
        yield task


@contextmanager
def server(model: str, shape: Shape, threads: int) -> Iterator[Any]:
    """A worker whose tasks wait for a model server on this machine, which takes one prompt at a time."""
    command = ["bench.peers.workers.model_server", "--model", folder(model), "--dtype", shape.dtype]
    with process([*command, "--threads", str(threads)], {}) as serving:
        assert serving.stdout is not None
        address = f"http://127.0.0.1:{int(serving.stdout.readline())}"
        pool = ("--pool", "threads", "--concurrency", str(SERVER_CALLS))
        with worker({"PLAIN_SERVER": address}, *pool) as app:
            task = app.tasks["plain.ask"]
            task.delay([1, 2, 3], 2).get(timeout=READY_S)
            yield task


@contextmanager
def worker(settings: dict[str, str], *options: str) -> Iterator[Any]:
    """The app of a running worker of bench/peers/workers/plain_celery.py."""
    from petiole.tasks.servers import embedded

    broker = f"redis+socket://{embedded.socket_path()}?virtual_host=5"
    os.environ["PLAIN_BROKER"] = broker
    from bench.peers.workers import plain_celery

    command = ["celery", "-A", "bench.peers.workers.plain_celery", "worker", *options]
    with process(command, {**settings, "PLAIN_BROKER": broker}):
        try:
            yield plain_celery.app
        finally:
            plain_celery.app.close()


@contextmanager
def process(module: list[str], settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    from petiole.tasks.commands.demos.demo import python_path

    started = subprocess.Popen(
        [sys.executable, "-m", *module],
        env={**os.environ, **settings, "PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if module[0].startswith("bench.") else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        started.terminate()
        started.wait()


def folder(model: str) -> str:
    from petiole.gpu_worker.models.checkpoint.finding import resolve_model

    return str(resolve_model(model))
