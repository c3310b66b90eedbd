"""Celery's consumer, made robust against malformed messages.

A stock worker exits on a header of the wrong type, and the redelivered message then ends the next worker. This
consumer quarantines a message that cannot be handled, fails its task if it has an id, and acknowledges it. Errors
of Redis or the result backend are raised as usual.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import redis
from celery.exceptions import CPendingDeprecationWarning
from celery.utils.time import maybe_iso8601
from celery.worker.consumer import Consumer as StockConsumer
from celery.worker.state import maybe_shutdown

from tasks.worker.quarantine import put_aside

logger = logging.getLogger(__name__)


CONNECTING_PAUSES_S = (1, 1, 5)
"""Pause before the second attempt to connect, its increment at each further attempt, and its maximum."""


class Consumer(StockConsumer):  # type: ignore[misc]
    def ensure_connected(self, conn: Any) -> Any:
        """Connect to the broker; retry without limit by default, and log each failed attempt."""
        conf = self.app.conf
        if not (conf.broker_connection_retry and conf.broker_connection_retry_on_startup):
            return super().ensure_connected(conn)

        def report(error: Exception, pause_s: float) -> None:
            reason = str(error).rstrip(".")
            logger.error("no connection to %s: %s; trying again in %.0f s", conn.as_uri(), reason, pause_s)

        most = conf.broker_connection_max_retries
        connected = conn.ensure_connection(report, most, *CONNECTING_PAUSES_S, callback=maybe_shutdown)
        self.first_connection_attempt = False
        return connected

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        with warnings.catch_warnings():  # about a default that a later Celery changes
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)

        def guarded(message: Any) -> None:
            reason = malformed(message)
            if reason is None:
                try:
                    handle(message)
                    self.make_room()
                except (redis.RedisError, OSError):
                    raise
                except Exception as error:
                    logger.exception("a message could not be handled")
                    reason = f"cannot be handled: {type(error).__name__}: {error}"
            if reason is not None:
                self.refuse(message, reason)

        return guarded

    def make_room(self) -> None:
        """Celery applies the prefetch that a task with an eta raises in the next turn of the event loop, which may
        be a second away: let it come at once."""
        if self.qos.value != self.qos.prev:
            self.pool.mailbox.post(lambda: None)

    def refuse(self, message: Any, reason: str) -> None:
        logger.error("a message was put aside: %s", reason)
        headers = message.headers if isinstance(message.headers, dict) else {}
        task_id = headers.get("id")
        body = message.body if isinstance(message.body, bytes) else str(message.body).encode(errors="replace")
        put_aside(
            self.app,
            body,
            str((message.delivery_info or {}).get("routing_key")),
            reason,
            task_id if isinstance(task_id, str) and 0 < len(task_id) <= 255 else None,
        )
        if not message.acknowledged:
            message.ack_log_error(logger, self.connection_errors)


_OPTIONAL: dict[str, tuple[type, ...]] = {
    "root_id": (str,),
    "parent_id": (str,),
    "group": (str,),
    "shadow": (str,),
    "eta": (str,),
    "expires": (str, int, float),
    "argsrepr": (str,),
    "kwargsrepr": (str,),
    "origin": (str,),
    "retries": (int,),
    "stamps": (dict,),
    "stamped_headers": (list,),
    "ignore_result": (bool,),
    "replaced_task_nesting": (int,),
    "group_index": (int,),
}


def malformed(message: Any) -> str | None:
    """The reason why Celery cannot handle this message, or None."""
    headers = message.headers
    if not isinstance(headers, dict):
        return "headers must be an object"
    if "task" not in headers:
        return None if _protocol_1(message) else "headers must name a task"
    if not isinstance(headers["task"], str) or not isinstance(headers.get("id"), str) or not headers["id"]:
        return "headers.task and headers.id must be text"
    for name, kinds in _OPTIONAL.items():
        value = headers.get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return f"headers.{name} must be {' or '.join(kind.__name__ for kind in kinds)}"
    for name in ("eta", "expires"):
        value = headers.get(name)
        if isinstance(value, str) and not _is_time(value):
            return f"headers.{name} must be a time in ISO 8601"
    limits = headers.get("timelimit")
    if limits is not None and not (
        isinstance(limits, list | tuple) and len(limits) == 2 and all(map(_limit_or_none, limits))
    ):
        return "headers.timelimit must be two numbers, null or from 0"
    try:
        body = message.payload
    except Exception as error:
        return f"body cannot be decoded: {error}"
    if isinstance(body, dict):
        return None if isinstance(body.get("kwargs", {}), dict) else "kwargs must be an object"
    if not (isinstance(body, list | tuple) and len(body) == 3):
        return "body must be [args, kwargs, embed]"
    args, kwargs, embed = body
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict) or not isinstance(embed, dict | None):
        return "body must be [args, kwargs, embed]: a list and two objects"
    return None


def _is_time(text: str) -> bool:
    try:
        maybe_iso8601(text)
    except Exception:
        return False
    return True


def _protocol_1(message: Any) -> bool:
    try:
        body = message.payload
    except Exception:
        return False
    return (
        isinstance(body, dict)
        and isinstance(body.get("task"), str)
        and isinstance(body.get("id"), str)
        and isinstance(body.get("args", []), list)
        and isinstance(body.get("kwargs", {}), dict)
    )


def _limit_or_none(value: object) -> bool:
    """0 is no limit, as Celery has it."""
    return value is None or (type(value) in (int, float) and value >= 0)  # type: ignore[operator]
