"""Stores the state STARTED, but never over a final state.

Celery checks for a stored SUCCESS and then writes, in two steps. It retries the second step if the connection is
lost. If a worker was paused or disconnected between the two, another worker may have finished the task meanwhile,
and its result would be overwritten. Here one script checks and writes, without retries, because a late STARTED is
useless."""

from __future__ import annotations

import logging
from typing import Any

import redis
from celery import states
from celery.backends.redis import RedisBackend

from petiole.tasks.servers.connections import LOST
from petiole.tasks.worker import scripts

logger = logging.getLogger(__name__)


def store_started(backend: Any, task_id: str, meta: dict[str, Any], request: Any) -> None:
    """`request` is Celery's context of the task. Redis errors are only logged."""
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
