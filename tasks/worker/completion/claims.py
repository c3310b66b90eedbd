"""Decides which delivery completes a task that has ended, and knows whether the task is completed.

To complete a task is to send what is linked to it (callbacks, error callbacks, the rest of its chain, the body of
its chord) and to store its result. Two workers may try to complete one task: a worker that was disconnected after
it had written the end, and the worker that got the message afterwards. So a task with anything linked is claimed
first:

    ended ──claim──► claimed ──links, result──► completed
                        └──expires: its worker died──► claimed by another delivery, which does both again

A worker that finds the task claimed stands by (see `standby`). A claim is valid for one lease. A task with nothing
linked needs no claim, because storing its result again changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import states

from petiole.tasks.app.backend import refuses
from petiole.tasks.errors import GenerationFailed
from petiole.tasks.servers import connections
from petiole.tasks.servers.replies import DamagedKey
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker import scripts
from petiole.tasks.worker.broker.ledger import lease_ms
from petiole.tasks.worker.completion.backend import expires_of
from petiole.tasks.worker.scripts import ClaimReply

logger = logging.getLogger(__name__)

RETIRING_MS = 60_000
"""How long the log stays, of a task whose output is read from its result."""


def linked(request: Any) -> bool:
    """Whether other tasks are sent when this one, Celery's `request`, ends."""
    return linked_on_success(request) or _embeds(request, "errbacks")


def linked_on_success(request: Any) -> bool:
    """Whether other tasks are sent when this one succeeds."""
    return _embeds(request, "callbacks", "chain", "chord")


def _embeds(request: Any, *names: str) -> bool:
    _, _, embed = request._payload
    return any((embed or {}).get(name) for name in names)


def claim(request: Any, completer: str) -> bool:
    """Claim the task for `completer`, which may claim it again. Returns False if another delivery completes it or
    has completed it."""
    if not linked(request):
        return True
    if _shown(request):  # if the backend does not answer, nothing is claimed
        return False
    keys, valid_ms = stream_keys(request.id), lease_ms(settings().visibility_timeout_s)
    script = scripts.load(connections.streams(), "claim")
    claimed = script([keys.completion, keys.completer], [valid_ms, completer])
    if claimed == ClaimReply.OVERWRITTEN:
        logger.error("task %s: its key %s was of the wrong type and is overwritten", request.id, keys.completion)
    return bool(claimed) and not _shown(request)  # by a worker that died before it could record that


def mark(request: Any) -> None:
    """Record that the task is completed."""
    if linked(request):
        connections.streams().set(stream_keys(request.id).completion, "done", ex=settings().stream_ttl_s)


def retire(request: Any, attempt: int) -> None:
    """Let the log expire of a task that is completed, and has its whole output in its stored result. Those who
    read the log now have `RETIRING_MS` for it, later readers get the result. Unless the result is not stored, or
    is not kept as long as the log."""
    kwargs, known = request._context.kwargs, settings()
    log_s = (kwargs.get("stream_ttl_s") if isinstance(kwargs, dict) else None) or known.stream_ttl_s
    result_s = expires_of(request._context) or known.result_expires_s
    if not request.ignore_result and log_s <= result_s:
        keys = stream_keys(request.id)
        scripts.load(connections.streams(), "retire")([keys.log, keys.state], [RETIRING_MS, attempt])


def completed(request: Any) -> bool:
    """Whether the task is completed."""
    keys, client = stream_keys(request.id), connections.streams()
    try:
        done = client.get(keys.completion) == b"done" or bool(client.hexists(keys.state, "retired"))
    except DamagedKey:
        done = False  # the next claim overwrites the key
    return done or _shown(request)


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
    except DamagedKey:  # it ends as a failure
        return False


def is_stored(request: Any) -> bool:
    """Whether a final state is stored, or the task stores none."""
    if request.ignore_result:
        return True
    return request.task.backend.get_task_meta(request.id, cache=False)["status"] in states.READY_STATES


def fail(request: Any, error: BaseException) -> None:
    """Store a failure for an outcome that no backend could store, because of `error`."""
    backend, failure = request.task.backend, GenerationFailed(f"its outcome cannot be stored: {error!r}")
    try:
        backend.mark_as_failure(request.id, failure, request=request._context)
    except Exception as refusal:
        if refuses(refusal):
            raise
        # without the message's other data, which may be the cause
        backend.store_result(request.id, failure, states.FAILURE)
