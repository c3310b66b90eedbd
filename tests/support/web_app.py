"""What a web app does with Petiole, each feature on its own, for an environment that has its own Celery.

Runs as a program: it prints, as JSON, `{feature: "" or what went wrong}`. It imports what a producer has, no more.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from celery import chain, chord, group
from celery.exceptions import TimeoutError as GaveUp

from petiole import tasks
from petiole.tasks import InvalidRequest, StreamDelta, astream, cancel, chat, generate, stream
from petiole.tasks.servers import connections

FEATURES: dict[str, Callable[[], object]] = {}
PATIENCE_S = 60


def feature(body: Callable[[], object]) -> Callable[[], object]:
    FEATURES[body.__name__] = body
    return body


def submit(**options: Any) -> Any:
    return generate.delay(**{"prompt": "hello", "max_tokens": 8, "seed": 1, **options})


def whole(deltas: list[StreamDelta], result: Any) -> None:
    assert [token for delta in deltas for token in delta.token_ids] == result.get(timeout=PATIENCE_S)["token_ids"]
    assert deltas[-1].finish_reason == "length"


@feature
def delay_and_get() -> None:
    result = submit()
    assert result.get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 8
    assert (result.state, result.get()["text"]) == ("SUCCESS", generate.AsyncResult(result.id).result["text"])


@feature
def get_gives_up() -> None:
    result = submit(max_tokens=4000)
    try:
        result.get(timeout=0.1)
    except GaveUp:
        return
    finally:
        cancel(result)
    raise AssertionError("get(timeout=0.1) waited for the end")


@feature
def many_threads_get() -> None:
    """Two of them wait for the same task, with a result object each."""
    results = [submit(seed=n) for n in range(10)]
    objects = [*results, *(generate.AsyncResult(result.id) for result in results)]
    with ThreadPoolExecutor(len(objects)) as threads:
        texts = list(threads.map(lambda one: one.get(timeout=PATIENCE_S)["text"], objects))
    assert texts[:10] == texts[10:]


@feature
def groups() -> None:
    results = group(generate.s(prompt=f"p{n}", max_tokens=3) for n in range(5)).apply_async()
    assert [one["finish_reason"] for one in results.get(timeout=PATIENCE_S)] == ["length"] * 5


@feature
def chains() -> None:
    last = chain(generate.s(prompt="a", max_tokens=3), generate.s(prompt="b", max_tokens=4)).apply_async()
    assert last.get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4


@feature
def chords() -> None:
    header = [generate.s(prompt=f"p{n}", max_tokens=3) for n in range(3)]
    assert (
        chord(header)(generate.s(prompt="all", max_tokens=5)).get(timeout=PATIENCE_S)["finish_reason"] == "length"
    )


@feature
def streams() -> None:
    result = submit(max_tokens=50)
    whole(list(stream(result, timeout_s=PATIENCE_S)), result)
    reader = generate.stream(prompt="hello", max_tokens=5)
    whole(list(reader), reader.result)


@feature
def asyncio_streams() -> None:
    async def read(result: Any) -> list[StreamDelta]:
        return [delta async for delta in astream(result, timeout_s=PATIENCE_S)]

    async def read_all(results: list[Any]) -> list[list[StreamDelta]]:
        return await asyncio.gather(*map(read, results))

    results = [submit(max_tokens=30, seed=n) for n in range(5)]
    for deltas, result in zip(asyncio.run(read_all(results)), results, strict=True):
        whole(deltas, result)


@feature
def conversations() -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    assert chat.delay(messages=messages, max_tokens=3).get(timeout=PATIENCE_S)["finish_reason"] == "length"


@feature
def cancelling() -> None:
    result = submit(max_tokens=4000)
    reader = stream(result, timeout_s=PATIENCE_S)
    next(reader)
    cancel(result)
    assert list(reader)[-1].finish_reason == "cancelled"


@feature
def a_stored_failure() -> None:
    """`send_task` checks nothing, so the worker fails the task, and its error arrives as the class that it is."""
    result = tasks.celery_app.send_task("tasks.generate", kwargs={"prompt": "hello", "max_tokens": 0})
    for read in (lambda: result.get(timeout=PATIENCE_S), lambda: list(stream(result, timeout_s=PATIENCE_S))):
        assert refused(read) == "max_tokens: must be at least 1, got 0"


@feature
def an_error_at_submission() -> None:
    assert refused(lambda: submit(max_tokens=0)) == "max_tokens: must be at least 1, got 0"


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except InvalidRequest as error:
        return str(error)
    raise AssertionError("no error")


@feature
def countdown() -> None:
    for wait_s in (0.3, 1.2):
        due = time.monotonic() + wait_s
        generate.apply_async(kwargs={"prompt": "hello", "max_tokens": 2}, countdown=wait_s).get(timeout=PATIENCE_S)
        assert time.monotonic() >= due, f"a countdown of {wait_s} s was not waited for"


@feature
def priority() -> None:
    """Each level is served, and on Redis it waits in the list where workers look for it."""
    for level in (0, 3, 9):
        result = generate.apply_async(kwargs={"prompt": "hello", "max_tokens": 2}, priority=level)
        assert result.get(timeout=PATIENCE_S)["finish_reason"] == "length"
        if "redis" in str(tasks.celery_app.conf.broker_url):
            generate.apply_async(kwargs={"prompt": "hello"}, priority=level, queue=(queue := f"nobodys-{uuid4()}"))
            assert connections.streams().llen(f"{queue}\x06\x16{level}" if level else queue) == 1


def attempt(body: Callable[[], object]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=DeprecationWarning, module=tasks.__name__)
            body()
    except Exception:
        return traceback.format_exc()
    return ""


def outcomes() -> dict[str, str]:
    return {name: attempt(body) for name, body in FEATURES.items()}


if __name__ == "__main__":
    print(json.dumps(outcomes()))
