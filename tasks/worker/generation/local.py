"""Eager tasks: `generate.apply(...)` and `task_always_eager` run the engine in this process, without a worker.

The engine is loaded at the first call and kept until the process ends.
"""

from __future__ import annotations

import atexit
import threading
from functools import partial
from typing import Any

from petiole.contract.requests.generation import Common
from petiole.contract.requests.images import is_handle
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker.generation.engine_requests import engine_request, images_of, stored
from petiole.tasks.worker.generation.engines import EngineLike, make_engine
from petiole.tasks.worker.generation.presentation import Presentation
from petiole.tasks.worker.output.outcomes import public, succeeded

_mutex = threading.Lock()
_engines: list[EngineLike] = []


def run(task_request: Common, task_id: str) -> dict[str, Any]:
    """Generate in this process. Raises the exception that the task would fail with."""
    images = images_of(task_request, _stored(task_request))
    serving = engine()
    presentation = Presentation.of(serving.facts())
    request = engine_request(
        task_id, task_request, presentation=presentation, images=images, deadline_s=task_request.deadline_s
    )
    prompt_end: list[str] = []
    try:
        result = serving.submit(
            request, on_prepared=lambda _, prepared: prompt_end.append(prepared.prompt_end)
        ).result()
    except Exception as error:
        raise public(error) from None
    lengths = partial(serving.text_lengths, request, result.token_ids)
    parts = presentation.parts(task_id, request, result, "".join(prompt_end), lengths)
    value = succeeded(result, 1, LoggedOutput(), parts).result
    assert value is not None
    return value


def _stored(task_request: Common) -> dict[str, bytes]:
    if any(map(is_handle, task_request.images())):  # an eager task connects to Redis for nothing else
        return stored(connections.streams(), [task_request], settings().image_ttl_s)
    return {}


def engine() -> EngineLike:
    """The engine of this process."""
    with _mutex:
        if not _engines:
            _engines.append(make_engine(settings()))
            atexit.register(_engines[0].shutdown, drain=False)
        return _engines[0]
