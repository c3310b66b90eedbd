"""A batch's tasks and results in Redis, many in a round trip.

Every function raises one of `AWAY` while a server is away."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import redis
from celery import states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import BackendError, TaskRevokedError
from kombu.exceptions import OperationalError

from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks import errors
from petiole.tasks.app.application import App
from petiole.tasks.errors import InvalidRequest, Unconfirmed
from petiole.tasks.fleet import control, models, queues, reports
from petiole.tasks.fleet.availability import lack, pause
from petiole.tasks.servers import connections
from petiole.tasks.submission import definitions as definitions  # the app has the tasks from here on
from petiole.tasks.submission.batches.in_flight import RowInFlight
from petiole.tasks.submission.batches.rows.output_lines import TaskOutcome
from petiole.tasks.submission.bundles import Bundles
from petiole.tasks.submission.task import SubmittedTask
from petiole.tasks.wire.keys import stream_keys

logger = logging.getLogger(__name__)

AWAY = (*connections.LOST, OperationalError, BackendError)
WRONG = (InvalidRequest, ValueError, TypeError, RecursionError)
"""Errors of one row's options."""
FAULTS = (AttributeError, LookupError, NameError, AssertionError)
"""Errors of the code: they do not pass while a batch waits."""
STREAM_TTL_S = 60
"""The time to live of a row's stream, which nobody follows."""
_A_CALL = 500


class Fleet(NamedTuple):
    """The workers of a queue. `places`: of the live ones; None: unknown. `fault`: why nothing goes on."""

    places: int | None = None
    fault: str | None = None


class BatchClient:
    def __init__(self, app: App, queue: str | None = None, model: str | None = None) -> None:
        """`queue`, `model`: as among the options of a submission."""
        self.app, self._queue, self._model = app, queue, model
        self._of_rows: str | None = None
        self._woken = False

    def goes_to(self, queue: str | None) -> None:
        """Where the last row's tasks go, whose model chooses the queue."""
        self._of_rows = queue

    @property
    def queue(self) -> str:
        """Where the tasks go. May read Redis. Raises `InvalidRequest` for a model that nobody serves."""
        own = str(self.app.conf.task_default_queue)
        if self._of_rows is not None:
            return self._of_rows
        if self._model is None:
            return self._queue or own
        return models.directory.find(self._model, own, self._queue).queue

    @property
    def lowest_priority(self) -> int:
        """On Redis 9; on RabbitMQ, where the highest number is served first, 0."""
        return 0 if scheme(self.app.conf.broker_url) in RABBITMQ else 9

    def task(self, name: str) -> SubmittedTask:
        """Raises `InvalidRequest`."""
        found = self.app.tasks.get(name)
        if not isinstance(found, SubmittedTask):
            known = sorted(
                one.removeprefix("tasks.")
                for one, task in self.app.tasks.items()
                if isinstance(task, SubmittedTask)
            )
            raise InvalidRequest("task", f"must be one of {', '.join(known)}", name)
        return found

    # ------------------------------------------------------------ there

    def send(self, rows: Iterable[RowInFlight]) -> Iterator[tuple[RowInFlight, Exception | None]]:
        """Send the tasks of these rows. Yields each row with the error that has prevented it. Raises an error that
        is neither of a row's options nor of a server: waiting would not help."""
        bundles, kept = Bundles(), []
        refused: list[tuple[RowInFlight, Exception]] = []
        for sent in rows:
            before = len(bundles.kept)
            try:
                for call, task_id in zip(sent.work.calls, sent.ids, strict=True):
                    options = (
                        {"stream_ttl_s": STREAM_TTL_S, **call.options}
                        if self._streams(call.task)
                        else call.options
                    )
                    self.task(call.task)._submit((), {**options, "task_id": task_id}, bundles)
            except (*AWAY, *WRONG) as error:
                refused.append((sent, error))  # its other tasks are sent nevertheless: they are known
            else:
                kept.append((sent, bundles.kept[before:]))
        bundles.send()
        if not self._woken and any(push.sent for push in bundles.kept):
            self._wake()
        yield from refused
        for sent, pushes in kept:
            failed = (one.error for one in pushes if not isinstance(one.error, Unconfirmed))
            failure = next(filter(None, failed), None)
            if isinstance(failure, (*FAULTS, *WRONG)) and not isinstance(failure, AWAY):
                raise failure  # its options are right: the message has been made
            yield sent, failure

    def _wake(self) -> None:
        """A worker on Redis that has nothing to do waits for urgent messages. After a command it looks for others,
        too, which it would do at the end of its wait."""
        self._woken = True
        with contextlib.suppress(*AWAY, redis.RedisError):
            self.app.control.broadcast("ping")

    @staticmethod
    def _streams(task: str) -> bool:
        return task != "tasks.count"

    # ------------------------------------------------------------ back

    def outcomes(self, task_ids: Sequence[str]) -> dict[str, TaskOutcome]:
        """How those of the tasks have ended that have ended."""
        ended: dict[str, TaskOutcome] = {}
        for task_id, meta in self._metas(task_ids):
            if meta["status"] == states.SUCCESS:
                ended[task_id] = TaskOutcome(result=meta["result"] if isinstance(meta["result"], dict) else {})
            elif meta["status"] in states.READY_STATES:
                ended[task_id] = TaskOutcome(error=self._error(meta))
        return ended

    def _metas(self, task_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        backend = self.app.backend
        if not isinstance(backend, BaseKeyValueStoreBackend):
            for task_id in task_ids:
                yield task_id, backend.get_task_meta(task_id, cache=False)
            return
        for some in pages(task_ids):
            found = backend.mget([backend.get_key_for_task(task_id) for task_id in some])
            for task_id, raw in zip(some, found, strict=True):
                if raw:
                    yield task_id, {"result": None, **backend.decode_result(raw)}

    def _error(self, meta: dict[str, Any]) -> dict[str, Any]:
        error = self.app.backend.exception_to_python(meta["result"]) if meta["result"] is not None else None
        if not isinstance(error, BaseException):
            error = (
                TaskRevokedError(str(error or "revoked")) if meta["status"] == states.REVOKED else Exception(error)
            )
        return errors.describe(error)

    def forget(self, task_ids: Sequence[str]) -> None:
        """Remove the results. The streams expire soon after their ends, for a producer may not delete them."""
        backend = self.app.backend
        for some in pages(task_ids):
            if isinstance(backend, BaseKeyValueStoreBackend) and hasattr(backend, "client"):
                backend.client.delete(*map(backend.get_key_for_task, some))
            else:
                for task_id in some:
                    backend.forget(task_id)

    # ------------------------------------------------------------ what goes on

    def begun(self, task_ids: Sequence[str]) -> set[str]:
        """The tasks, of these, that a worker has begun."""
        found: set[str] = set()
        for some in pages(task_ids):
            answers = connections.perform(
                [("HGETALL", stream_keys(task_id).state) for task_id in some], raises=False
            )
            found |= {
                task_id for task_id, state in zip(some, answers, strict=True) if isinstance(state, dict) and state
            }
        return found

    def waiting(self) -> int:
        """The messages that wait in the queue."""
        mine = self.queue
        return sum(n for (name, _), n in queues.queue_lengths(self.app, [mine]).items() if name == mine)

    def fleet(self) -> Fleet:
        try:
            known = reports.workers()
        except redis.exceptions.NoPermissionError:
            return Fleet()
        mine = self.queue
        live = [one for one in known if not one.lost and mine in one.queues]
        fault = lack(known, mine) or pause(known, mine)
        return Fleet(sum(one.slots for one in live) or None, fault)

    def cancel(self, task_ids: Sequence[str]) -> None:
        if task_ids:
            control.flag_cancel(*task_ids)
            self.app.control.revoke(list(task_ids), terminate=True)


def pages(task_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(task_ids), _A_CALL):
        yield task_ids[start : start + _A_CALL]
