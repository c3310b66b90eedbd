"""How a task has ended, read from its state: without its log, and without a result backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.result import AsyncResult
from pydantic import ValidationError

from petiole.tasks.errors import StreamError, UnknownTask
from petiole.tasks.keys import stream_keys
from petiole.tasks.requests.results import End
from petiole.tasks.servers import connections


def end(task: AsyncResult | str) -> End | None:
    task_id = _id(task)
    return _read(task_id, connections.streams().hgetall(stream_keys(task_id).state))


async def aend(task: AsyncResult | str) -> End | None:
    task_id = _id(task)
    return _read(task_id, await connections.async_streams().hgetall(stream_keys(task_id).state))


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
