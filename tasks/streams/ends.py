"""How a task has ended, read from its state: without its log, and without a result backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery.result import AsyncResult
from pydantic import ValidationError

from petiole.contract.results.task_result import End
from petiole.contract.settings.urls import redacted
from petiole.tasks.errors import StreamError, Unavailable, UnknownTask
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import stream_keys


def end(task: AsyncResult | str) -> End | None:
    task_id = _id(task)
    keys, client = stream_keys(task_id), connections.streams()
    with _reaching():
        state = client.hgetall(keys.state) or client.hgetall(keys.asked)
    return _read(task_id, state)


async def aend(task: AsyncResult | str) -> End | None:
    task_id = _id(task)
    keys, client = stream_keys(task_id), connections.async_streams()
    with _reaching():
        state = await client.hgetall(keys.state) or await client.hgetall(keys.asked)
    return _read(task_id, state)


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except connections.LOST as error:
        raise Unavailable(redacted(settings().streams_url), str(error)) from error


def _id(task: AsyncResult | str) -> str:
    return task if isinstance(task, str) else str(task.id)


def _read(task_id: str, state: Mapping[Any, Any]) -> End | None:
    if not state:
        raise UnknownTask(f"task {task_id}: Redis has nothing of it")
    done = state.get(b"done")
    try:
        return None if done is None else End.model_validate_json(done)
    except ValidationError:
        raise StreamError(f"task {task_id}: the record of its end cannot be read") from None
