"""The quarantine of messages that cannot be parsed or that Celery cannot handle. If a message has a task id, the
task is also stored as failed and its stream ended.

    petiole:quarantine    list, newest first: {"at", "queue", "reason", "task_id", "message"}; capped, with a TTL
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

import redis

from tasks import connections
from tasks.errors import InvalidRequest, describe
from tasks.fleet import QUARANTINE_KEY
from tasks.schemas import stream_keys
from tasks.settings import settings
from tasks.worker import scripts, wire

logger = logging.getLogger(__name__)

KEPT = 1000
KEPT_S = 7 * 86_400
SHOWN_BYTES = 65_536

_ID = re.compile(rb'"(?:id|correlation_id)": ?"([0-9A-Za-z_-]{1,64})"')


def put_aside(app: Any, message: bytes, queue: str, reason: str, task_id: str | None = None) -> None:
    """Quarantine a message and fail its task. Raises no error of Redis: a bad message must not end the worker."""
    if task_id is None and (match := _ID.search(message[:SHOWN_BYTES])):
        task_id = match[1].decode()
    entry = {
        "at": time.time(),
        "queue": queue,
        "reason": reason,
        "task_id": task_id,
        "message": message[:SHOWN_BYTES].decode(errors="replace"),
    }
    try:
        client = connections.streams()
        with client.pipeline() as pipe:
            pipe.lpush(QUARANTINE_KEY, json.dumps(entry))
            pipe.ltrim(QUARANTINE_KEY, 0, KEPT - 1)
            pipe.expire(QUARANTINE_KEY, KEPT_S)
            pipe.execute()
        if task_id is not None:
            error = InvalidRequest("message", reason, message[:200].decode(errors="replace"))
            app.backend.mark_as_failure(task_id, error)
            end_stream(client, task_id, settings().stream_ttl_s * 1000, describe(error))
    except (redis.RedisError, OSError) as error:
        logger.error("a bad message could not be put aside: %s", error)


def end_stream(client: redis.Redis, task_id: str, ttl_ms: int, error: dict[str, Any]) -> None:
    """Write the last delta of a stream without a worker, because its readers wait for one."""
    keys = stream_keys(task_id)
    script = scripts.load(client, "close")
    script([keys.log, keys.state], [ttl_ms, *wire.closing(task_id, error)])
