"""Decides which delivery completes a task that has ended, and whether that is done.

To complete a task is to send what is linked to it (callbacks, error callbacks, the rest of its chain, the body of
its chord) and to store its result. Two workers may find it to do: one that was disconnected after it had written
the end, and the one that got its message. So a task that has something linked is claimed first:

    ended ──claim──► claimed ──links, result──► completed
                        └──expires: its worker died──► claimed by another delivery, which does both again

Who finds it claimed stands by (see `standby`). A claim is valid for one lease. A task with nothing linked needs no
claim, because storing its result again changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import states

from tasks import connections
from tasks.backend import RedisBackend
from tasks.masters import wrong_type
from tasks.schemas import stream_keys
from tasks.settings import settings
from tasks.worker import scripts
from tasks.worker.ledger import lease_ms

logger = logging.getLogger(__name__)

STORE_AGAIN_S = 300.0


class OutcomeNotStoredError(Exception):
    """The result backend refuses the outcome of a task that has ended."""


def linked(request: Any) -> bool:
    """Whether other tasks are sent when this one, Celery's `request`, ends."""
    return linked_on_success(request) or _embeds(request, "errbacks")


def linked_on_success(request: Any) -> bool:
    """Whether other tasks are sent when this one succeeds."""
    return _embeds(request, "callbacks", "chain", "chord")


def _embeds(request: Any, *names: str) -> bool:
    _, _, embed = request._payload
    return any((embed or {}).get(name) for name in names)


def claim(request: Any) -> bool:
    """Whether the caller is to complete the task. False if another delivery does, or has done so."""
    if not linked(request):
        return True
    key, valid_ms = stream_keys(request.id).completion, lease_ms(settings().visibility_timeout_s)
    claimed = scripts.load(connections.streams(), "claim")([key], [valid_ms])
    if claimed == 2:
        logger.error("task %s: its key %s held something else, and was written anew", request.id, key)
    return bool(claimed) and not _shown(request)  # by one that died before it could record that


def mark(request: Any) -> None:
    """Record that the task is completed."""
    if linked(request):
        connections.streams().set(stream_keys(request.id).completion, "done", ex=settings().stream_ttl_s)


def completed(request: Any) -> bool:
    """Whether nothing is left to do."""
    try:
        done = connections.streams().get(stream_keys(request.id).completion) == b"done"
    except redis.ResponseError as error:
        if not wrong_type(error):
            raise
        done = False  # whoever claims it next writes the key anew
    return done or _shown(request)


def chord_returned(request: Any, status: str, result: Any) -> bool:
    """Count the task in its chord. False if another worker has claimed to send the chord's body, and may have died
    before it did: Celery lets such a claim expire, but nobody would look again."""
    backend, context = request.task.backend, request._context
    backend.on_chord_part_return(context, status, result)
    if not isinstance(backend, RedisBackend):
        return True
    redis_backend: Any = backend
    return redis_backend.client.get(redis_backend.get_key_for_group(context.group, ".c")) in (None, b"done")


def _shown(request: Any) -> bool:
    """Whether the stored result shows that the task is completed. Celery sends callbacks before it stores a
    success, but error callbacks after it has stored a failure."""
    if request.ignore_result:
        return not linked(request) and _ended(request.id)
    status = request.task.backend.get_task_meta(request.id, cache=False)["status"]
    return status in states.READY_STATES and not (status == states.FAILURE and linked(request))


def _ended(task_id: str) -> bool:
    try:
        return bool(connections.streams().hexists(stream_keys(task_id).state, "done"))
    except redis.ResponseError:  # damaged: it ends as a failure
        return False


def store_again(request: Any, result: dict[str, Any] | None, stop: Callable[[], bool]) -> bool:
    """Called when Celery has reported a failure: store the success that the backend refused (full, or long
    unreachable). False if the failure is what Celery has stored, such as of a callback that could not be sent.

    Raises an exception if nothing is stored in the end: then the message must not be acknowledged.
    """
    if request.ignore_result:
        return False
    backend, give_up_at = request.task.backend, time.monotonic() + STORE_AGAIN_S
    while True:
        try:
            if backend.get_task_meta(request.id, cache=False)["status"] in states.READY_STATES:
                return False
            if result is not None:
                backend.mark_as_done(request.id, result, request._context)
                return True
        except Exception as error:
            logger.error("task %s: its result cannot be stored yet: %s", request.id, error)
        if result is None or stop() or time.monotonic() > give_up_at:
            raise OutcomeNotStoredError(request.id)
        time.sleep(1.0)
