"""Tasks of the same app that are no generations."""

import os
import signal
import sys
import tempfile
from pathlib import Path

from celery import Task

from petiole.tasks.app.application import app
from petiole.tasks.servers import connections
from tests.support.site import eventually


@app.task(name="foreign.add")
def add(a: int, b: int) -> int:
    return a + b


@app.task(name="foreign.fail")
def fail() -> None:
    raise RuntimeError("as it should")


@app.task(name="foreign.exit")
def exit() -> None:
    sys.exit(3)


@app.task(name="foreign.too_big")
def too_big() -> None:
    raise MemoryError("no room")


@app.task(name="foreign.wait")
def wait(gate: str) -> str:
    """Leave a mark, then wait until the folder `gate` holds the file `open`."""
    tempfile.mkstemp(prefix="run-", dir=gate)
    eventually((Path(gate) / "open").exists, "the gate is opened")
    return "opened"


@app.task(name="foreign.die")
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="foreign.try_again", bind=True, max_retries=2)
def try_again(self: Task) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(name="foreign.count_down", bind=True)
def count_down(self: Task, number: int) -> str:
    if number:
        raise self.replace(self.s(number - 1))
    return "done"


@app.task(name="foreign.note")
def note(given: object, name: str) -> str:
    """Count the runs of this name in Redis."""
    connections.streams().incr(f"noted:{name}")
    return name
