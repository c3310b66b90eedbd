"""The result backend of a worker: what it stores and counts for the end of a task obeys the rules of `once`.

A task is counted in its chord by Celery's own script, whose effect is the same when it runs again. The task that
completes the chord claims to send its body, by a token that is new with each call. If the reply to the script is
lost, the next call finds a claim that seems to be another's, and the body is never sent. So here it is noted for
which task a claim is (`count.lua`), and the same task takes it over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import redis
from celery import states
from celery.backends import redis as stock
from celery.backends.redis import CHORD_PART_RETURN_LUA

from petiole.contract.settings.urls import SENTINEL
from petiole.contract.tasks import TASKS
from petiole.tasks.app import backend as producers
from petiole.tasks.servers.connections import LOST
from petiole.tasks.settings import settings
from petiole.tasks.worker import scripts
from petiole.tasks.worker.idempotency import IdempotentCompletion, ServerUnavailable, guarded, trial
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

MINUTE_S = 60
"""The shortest time for which a request may have its result kept."""
AGAIN_S, COUNTED_FOR_S = 1.0, 300.0
"""How often, and for how long, a foreign task is counted again in its chord. A completion is parked instead."""


class BodyClaimedError(Exception):
    """A worker that does not note its task has claimed to send the body of a chord, and may have died. Celery lets
    the claim expire, but nobody would look again."""


class _Pipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with guarded():
            return super().execute(raise_on_error)


class _Commands(redis.Redis):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        stock: Any = super()
        with guarded():
            return stock.execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


def expires_of(context: Any) -> int | None:
    """How long a generation's result is kept, if its request says so. `context` is Celery's. A task of the
    application's may have an option of the same name."""
    kwargs = getattr(context, "kwargs", None) if getattr(context, "task", None) in TASKS else None
    value = kwargs.get("result_expires_s") if isinstance(kwargs, dict) else None
    return value if type(value) is int and MINUTE_S <= value <= settings().result_expires_s else None


class RedisBackend(producers.RedisBackend):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stored: set[str] = set()

    def _get_client(self) -> type[redis.Redis]:
        return _Commands

    @contextlib.contextmanager
    def having_stored(self, task_ids: Sequence[str]) -> Iterator[None]:
        """In this context, successes of these tasks are not stored, because the worker has stored them
        together."""
        self._stored.update(task_ids)
        try:
            yield
        finally:
            self._stored.difference_update(task_ids)

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **options: Any) -> Any:
        if state == states.SUCCESS and task_id in self._stored:
            return result
        stored = super().store_result(task_id, result, state, *args, **options)
        if state in states.READY_STATES and (kept_s := expires_of(options.get("request"))) is not None:
            self.expire(self.get_key_for_task(task_id), kept_s)
        return stored

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        """In a completion, a key that should hold a result but holds something else counts as missing, and is
        overwritten. Callers that wait for the result get the error."""
        try:
            return super()._get_task_meta_for(task_id)
        except Exception as error:
            if trial() is None:
                raise
            logger.error("task %s: its stored result cannot be read and is overwritten: %r", task_id, error)
            return {"status": states.PENDING, "result": None}

    def add_pending_result(self, result: Any, *args: Any, **options: Any) -> Any:
        """Do not subscribe to the result of a link: nobody waits for it here."""
        return result if trial() is not None else super().add_pending_result(result, *args, **options)

    def on_chord_part_return(self, request: Any, state: str, result: Any, *args: Any, **options: Any) -> Any:
        if not request.group:
            return None
        if (once := trial()) is None:
            return self._count_foreign(request, state, result)
        with once.within(str(request.group)):
            return super().on_chord_part_return(request, state, result, *args, **options)

    def _count_foreign(self, request: Any, state: str, result: Any) -> Any:
        """Count a task of the application's own, whose trace cannot be taken up again after a refusal."""
        once, until = IdempotentCompletion(request.id), time.monotonic() + COUNTED_FOR_S
        while True:
            try:
                with once.trying():
                    return self.on_chord_part_return(request, state, result)
            except ServerUnavailable as refusal:
                if time.monotonic() < until:
                    logger.warning("task %s is not counted in its chord yet: %s", request.id, refusal)
                    time.sleep(AGAIN_S)
                elif threading.current_thread() is threading.main_thread():
                    raise refusal.reason from None
                else:
                    raise

    def chord_error_from_stack(self, callback: Any, exc: Any = None) -> Any:
        """Celery's own. The chord is counted, and a line names it: its parts are stored, but its body never
        runs."""
        incidents.count("failed_chords")
        names = callback.task, callback.id, type(exc).__name__
        logger.error("the body of a chord will not run: %s, task %s: %s", *names)
        return super().chord_error_from_stack(callback, exc)

    @cached_property
    def _chord_part_return_script(self) -> Any:
        script = self.client.register_script(
            f"local function counted()\n{CHORD_PART_RETURN_LUA}\nend\n{scripts.SOURCES['count']}"
        )

        def count(keys: Sequence[bytes], args: Sequence[Any], client: Any) -> list[Any]:
            number, more, size, claimed, strange = script([*keys, keys[-1] + b".task"], args, client)
            if strange and (once := trial()) is not None:
                raise once.refuse(BodyClaimedError("somebody else sends the body of its chord"))
            return [number, more, size, claimed]

        return count


class SentinelBackend(RedisBackend, producers.SentinelBackend):
    """`RedisBackend` that asks the sentinels for the address of the master."""


BACKENDS = {
    **dict.fromkeys(("redis", "rediss"), f"{__name__}:RedisBackend"),
    SENTINEL: f"{__name__}:SentinelBackend",
}
"""By scheme of the result backend's URL, for Celery's loader."""


def store_started(backend: Any, task_id: str, meta: dict[str, Any], request: Any) -> None:
    """Store the state STARTED, but never over a final state. `request` is Celery's context of the task. Redis
    errors are only logged.

    Celery checks for a stored SUCCESS and then writes, in two steps. It retries the second step if the connection
    is lost. If a worker was paused or disconnected between the two, another worker may have finished the task
    meanwhile, and its result would be overwritten. Here one script checks and writes, without retries, because a
    late STARTED is useless."""
    if not isinstance(backend, stock.RedisBackend):
        backend.store_result(task_id, meta, states.STARTED, request=request)
        return
    started = backend._get_result_meta(meta, states.STARTED, None, request)
    value = backend.encode({**started, "task_id": task_id})
    try:
        store = scripts.load(backend.client, "started")
        store([backend.get_key_for_task(task_id)], [int(backend.expires or 0), value, *states.READY_STATES])
    except (redis.RedisError, *LOST) as error:
        logger.debug("task %s: STARTED was not stored: %s", task_id, error)
