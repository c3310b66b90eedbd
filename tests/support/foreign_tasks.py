"""Tasks of the same app that are no generations."""

import sys

from tasks.app import app


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
