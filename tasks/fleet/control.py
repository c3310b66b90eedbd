"""Commands to a task or a worker: ask for a task's state, cancel a task; pause, resume, reload or drain a
worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.states import PENDING, RECEIVED

from petiole import _lazy
from petiole.contract.settings.urls import redacted
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.errors import Unavailable
from petiole.tasks.wire.keys import stream_keys

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from petiole.tasks import settings
    from petiole.tasks.fleet import reports
    from petiole.tasks.servers import connections
else:  # a web app imports `cancel`
    reports = _lazy.module("petiole.tasks.fleet.reports")
    settings = _lazy.module("petiole.tasks.settings")
    connections = _lazy.module("petiole.tasks.servers.connections")

CANCELLED_FOR_S = 30 * 86_400
"""Time to live of the cancel flag of a task that no worker has ended: it may wait in a queue, or for its eta. The
flag is a field of a small hash, which expires with the stream once the task has ended."""

_FLAGS_A_CALL = 1000

Answer = dict[str, str]


def state_of(task_id: str, app: Celery = celery_app) -> str:
    """The task's Celery state. `PENDING` only if no worker has received it: it is queued, or does not exist."""
    keys, state = stream_keys(task_id), app.AsyncResult(task_id).state
    if state == PENDING:
        client = connections.streams()  # only commands that a producer's ACL allows
        taken = client.llen(keys.log) or client.hgetall(keys.state)
        return str(RECEIVED if taken else PENDING)
    return str(state)


def cancel(task: AsyncResult | str, app: Celery = celery_app) -> None:
    """Cancel a task, given its `AsyncResult` or its id, wherever it is: queued, running, or between two workers.

    Celery's `revoke` reaches the workers that are running now. The flag in Redis reaches the next worker that gets
    the task."""
    task_id = task if isinstance(task, str) else str(task.id)
    flag_cancel(task_id)
    app.control.revoke(task_id, terminate=True)


async def acancel(*tasks: AsyncResult | str) -> None:
    """`cancel` for asyncio, of any number of tasks. It needs no thread, and no connection beside those that read
    streams. A worker that runs a task notices within half a second."""
    steps, answers = _flagging([task if isinstance(task, str) else str(task.id) for task in tasks]), None
    with contextlib.suppress(StopIteration):
        while True:
            answers = await connections.aperform(steps.send(answers), raises=False)


def register(task_id: str) -> None:
    """Note in Redis that the task is about to be submitted. It may wait in a queue, or for its `eta`. Raises
    `Unavailable`."""
    asked, known = stream_keys(task_id).asked, settings.settings()
    try:
        with connections.streams().pipeline(transaction=False) as pipe:
            pipe.hset(asked, "submitted", round(time.time(), 3))
            pipe.expire(asked, max(known.stream_ttl_s, CANCELLED_FOR_S))
            pipe.execute()
    except connections.LOST as error:
        raise Unavailable(redacted(known.streams_url), str(error)) from None


def flag_cancel(*task_ids: str) -> None:
    """Set the cancel flag in Redis, for the workers that have the tasks or get them next."""
    steps, answers = _flagging(task_ids), None
    with contextlib.suppress(StopIteration):
        while True:
            answers = connections.perform(steps.send(answers), raises=False)


def _flagging(task_ids: Sequence[str]) -> Generator[connections.Commands, list[Any] | None, None]:
    """Yields commands, and is sent the answers: those of some hundred tasks at a time. An answer may be an
    exception, because a damaged key must not affect other tasks."""
    ttl_s, failures = settings.settings().stream_ttl_s, list[Exception]()
    for start in range(0, len(task_ids), _FLAGS_A_CALL):
        keys = [stream_keys(task_id) for task_id in task_ids[start : start + _FLAGS_A_CALL]]
        # HGETALL is a command that a producer's ACL allows.
        known = yield [("HGETALL", one.state) for one in keys]
        commands: list[tuple[Any, ...]] = []
        for one, fields in zip(keys, known or (), strict=True):
            lives_s = ttl_s if _ended(fields) else max(ttl_s, CANCELLED_FOR_S)
            commands += [("HSET", one.asked, "cancel", 1), ("EXPIRE", one.asked, lives_s), ("HGETALL", one.state)]
        answers = (yield commands) or []
        ended = [one.asked for one, fields in zip(keys, answers[2::3], strict=True) if _ended(fields)]
        if ended:  # perhaps since it was read before
            yield [("EXPIRE", asked, ttl_s) for asked in ended]
        failures += [answer for answer in answers if isinstance(answer, Exception)]
    if failures:
        raise failures[0]


def _ended(fields: Any) -> bool:
    return isinstance(fields, dict) and b"done" in fields


ANSWER_S = 2.0
"""How long to wait for the answers of workers to a command about their engines."""

BEGIN_S = 10.0
"""How long a worker that reports but does not answer is asked again to pause or to go on. Workers report before
they listen to commands."""


def pause(workers: Sequence[str] = (), app: Celery = celery_app) -> dict[str, Answer]:
    """Stop the engines of these workers, or of all. The workers keep the tasks that they have, and take no
    more."""
    return _ask_again("pause_engine", workers, app)


def resume(workers: Sequence[str] = (), app: Celery = celery_app) -> dict[str, Answer]:
    """Let paused engines go on."""
    return _ask_again("resume_engine", workers, app)


def reload(model: str, workers: Sequence[str] = (), app: Celery = celery_app) -> dict[str, Answer]:
    """Replace the weights of these workers, or of all, by those of a checkpoint of the same shape: a folder on
    each worker's machine, or a hub id. Returns before the weights are loaded: see `engines`."""
    return _ask("reload_engine", workers, app, model=model)


def engines(workers: Sequence[str] = (), app: Celery = celery_app) -> dict[str, Answer]:
    """By worker: `state` (ready, paused, reloading, draining), `model`, `fingerprint`, and the `error` of the last
    reload, if it was refused."""
    return _ask("engine_state", workers, app)


def _ask_again(command: str, workers: Sequence[str], app: Celery) -> dict[str, Answer]:
    """`_ask`, repeated until all workers that report have answered. For a command that may be given twice."""
    answers, give_up_at = _ask(command, workers, app), time.monotonic() + BEGIN_S
    while (silent := _reporting(workers) - answers.keys()) and time.monotonic() < give_up_at:
        answers |= _ask(command, sorted(silent), app)
    return answers


def _reporting(workers: Sequence[str]) -> set[str]:
    """The workers that report, of these or of all. Empty if the reports cannot be read."""
    with contextlib.suppress(Exception):
        live = {worker.worker for worker in reports.workers() if not worker.lost}
        return live & {*workers} if workers else live
    return set()


def _ask(command: str, workers: Sequence[str], app: Celery, **arguments: str) -> dict[str, Answer]:
    """The answers by worker. An answer without `error` is a success."""
    replies = app.control.broadcast(
        command,
        arguments=arguments,
        destination=list(workers) or None,
        reply=True,
        timeout=ANSWER_S,
        limit=len(workers) or None,
    )
    return {worker: answer for reply in replies or () for worker, answer in reply.items()}


def drain(worker: str, app: Celery = celery_app) -> None:
    """Shut a worker down warmly: it takes no more tasks, runs on for `drain_seconds`, and hands back the rest."""
    app.control.shutdown(destination=[worker])
