"""Tasks of the same app that are no generations."""

from tasks.app import app


@app.task(name="foreign.add")
def add(a: int, b: int) -> int:
    return a + b


@app.task(name="foreign.fail")
def fail() -> None:
    raise RuntimeError("as it should")
