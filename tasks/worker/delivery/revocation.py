"""Revoked and expired tasks. They end like others: first in their stream, then in Celery's result backend.

In stock Celery, every worker that learns of a revocation stores REVOKED: the worker that has the task, and each
other worker that finds no stored state. That has three faults here. The stream, possibly begun by another worker,
gets no last delta. The task may be about to succeed. And if its worker dies before the acknowledgement, the next
worker, which never received the revocation, completes the task as a success.

So here a request only records the revocation. Its job writes the last delta, which only the attempt that owns the
task can do, and then lets Celery announce the revocation. On `terminate`, a worker that does not have the task
sets the cancel flag for the worker that gets it.

`celery control time_limit` changes the two limits of Celery (`delivery.TimeLimits`)."""

from __future__ import annotations

import logging
import signal as signals
from collections.abc import Sequence
from functools import partial
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state as known
from celery.worker.control import control_command, time_limit as stock_time_limit
from celery.worker.request import Request as StockRequest

from petiole.tasks.fleet import control
from petiole.tasks.worker.output.outcomes import Ending

logger = logging.getLogger(__name__)

AT_ONCE = 500


class Request(StockRequest):  # type: ignore[misc]
    ending: Ending | None = None

    def revoked(self) -> bool:
        """Returns False: even a revoked task is taken, and its job ends the stream."""
        if self.ending is None:
            super().revoked()
        return False

    def _announce_revoked(self, reason: str, terminated: bool, signum: int | None, expired: bool) -> None:
        self.ending = "expired" if expired else "revoked"

    def terminate(self, pool: Any, signal: object = None) -> None:
        self.ending = self.ending or "revoked"
        if self._apply_result is not None and (job := self._apply_result()) is not None:
            job.stop(self.ending)
        else:  # it waits for its eta or a rate limit, and another worker may get it meanwhile
            pool.services.completions.run(lambda: control.flag_cancel(self.id))

    def announce(self, ending: str, *, running: bool) -> None:
        """Store the state REVOKED, send event and signal, and acknowledge the message."""
        if ending == "revoked" and running:
            super()._announce_revoked("terminated", True, signals.SIGTERM, False)
        else:
            super()._announce_revoked(ending, False, None, ending == "expired")


def _note(consumer: Any, ids: Sequence[str]) -> None:
    """Celery's set takes some microseconds for each id. So of thousands, some hundred are added in each turn of
    the event loop: other messages wait for no more."""
    known.revoked.update(ids[:AT_ONCE])
    if rest := ids[AT_ONCE:]:
        consumer.hub.call_soon(consumer.pool.services.mailbox.post, partial(_note, consumer, rest))


@control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(
    state: Any, task_id: Any, terminate: bool = False, signal: object = None, **_: object
) -> dict[str, str]:
    """Revoke task by task id (or list of ids)."""
    ids = set(maybe_list(task_id) or ())
    _note(state.consumer, list(ids))
    if not terminate:
        logger.info("revoked: %s", ", ".join(ids))
        return {"ok": f"tasks {ids} flagged as revoked"}
    pool = state.consumer.pool
    held = [one for one in ids if one in known.requests]
    for one in held:
        logger.info("terminating %s", one)
        known.requests[one].terminate(pool, signal)
    if others := ids.difference(held):
        pool.services.completions.run(lambda: control.flag_cancel(*others))
    return {"ok": f"terminate: {', '.join(held) or 'tasks unknown'}"}


@control_command(  # type: ignore[untyped-decorator]
    variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]"
)
def terminate(state: Any, signal: object, task_id: Any, **_: object) -> dict[str, str]:
    """Terminate task by task id (or list of ids)."""
    return revoke(state, task_id, terminate=True, signal=signal)  # type: ignore[no-any-return]


@control_command(  # type: ignore[untyped-decorator]
    args=[("task_name", str), ("soft", float), ("hard", float)],
    signature="<task_name> <soft_secs> [hard_secs]",
)
def time_limit(
    state: Any, task_name: str | None = None, hard: float | None = None, soft: float | None = None, **_: object
) -> Any:
    """Tell worker(s) to modify the time limit for task by type.

    Unlike a stock worker, which replies that it did so but keeps the old limits, this worker changes them.
    """
    reply = stock_time_limit(state, task_name, hard, soft)
    state.consumer.update_strategies()  # new requests read their limits from the strategies
    return reply
