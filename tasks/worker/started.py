"""The state STARTED, stored only while the task has no end.

Celery looks whether there is a SUCCESS and then writes, in two steps, and tries the second again when the
connection is lost. A worker that was stopped or cut off in between would write STARTED over the result of the one
that has finished its task meanwhile, and nobody would ever see it. Here one script looks and writes, and nothing
is tried again: STARTED is news, and old news is none.
"""

from __future__ import annotations

import logging
from typing import Any

import redis
from celery import states
from celery.backends.redis import RedisBackend

from tasks.connections import LOST
from tasks.worker import scripts

logger = logging.getLogger(__name__)


def store_started(backend: Any, task_id: str, meta: dict[str, Any], request: Any) -> None:
    """`request` is Celery's context of the task."""
    if not isinstance(backend, RedisBackend):
        backend.store_result(task_id, meta, states.STARTED, request=request)
        return
    started = backend._get_result_meta(meta, states.STARTED, None, request)
    value = backend.encode({**started, "task_id": task_id})
    try:
        store = scripts.load(backend.client, "started")
        store([backend.get_key_for_task(task_id)], [int(backend.expires or 0), value, *states.READY_STATES])
    except (redis.RedisError, *LOST) as error:
        logger.debug("task %s: STARTED was not stored: %s", task_id, error)
