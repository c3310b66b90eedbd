"""Shutdown of a worker: finish tasks in time, or hand them back to the queue.

An unacknowledged message goes back to its queue when the channel closes, shortly after this. Before that, all
generated tokens must be in the log and the task marked as handed back, so that the next worker resumes at the next
token and does not count a death.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from petiole.tasks.worker.delivery.mailbox import Mailbox
from petiole.tasks.worker.foreign.tasks import ForeignTasks
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.generation.intake import Intake
from petiole.tasks.worker.generation.job import Job

logger = logging.getLogger(__name__)

HANDBACK_S = 5.0


class Leaving(Protocol):
    """What a handoff uses of the pool. `hub` is kombu's event loop."""

    started: bool
    draining: bool
    engine: EngineLike
    intake: Intake
    foreign: ForeignTasks
    mailbox: Mailbox
    hub: Any

    @property
    def jobs(self) -> Mapping[str, Job]: ...

    def close_threads(self) -> None: ...


def hand_off(pool: Leaving, drain_s: float) -> None:
    """Drain for up to `drain_s`, then hand back. Runs on the consumer's thread; further calls do nothing."""
    if not pool.started:
        return
    if not pool.draining:
        pool.draining = True
        pool.intake.close()
        began = time.monotonic()
        if pool.engine.healthy and _busy(pool):
            taken = len(pool.jobs) + len(pool.foreign.running)
            logger.info("finishing %s, for %.0f s at most", _tasks(taken), drain_s)
            pool.mailbox.wait(lambda: not _busy(pool), drain_s, lambda: run_acknowledgements(pool.hub))
        cut_off = pool.foreign.close()
        unfinished = list(pool.jobs.values())
        for job in unfinished:
            job.hand_back()
        pool.mailbox.wait(
            lambda: all(job.over for job in pool.jobs.values()),
            HANDBACK_S,
            lambda: run_acknowledgements(pool.hub),
        )
        if unfinished or cut_off:
            count = _tasks(len(unfinished) + cut_off)
            logger.info("gave %s back after %.1f s", count, time.monotonic() - began)
        pool.close_threads()


def _tasks(number: int) -> str:
    return "1 task" if number == 1 else f"{number} tasks"


def _busy(pool: Leaving) -> bool:
    """Whether a task may still finish here. One that the intake had not begun, now that it is closed, will not.
    One whose outcome the result backend refuses need not: the next worker stores it."""
    begun = [job for job in pool.jobs.values() if job.outbox is not None or job.outcome is not None]
    return bool(pool.foreign.running) or not all(job.over or job.parked for job in begun)


def run_acknowledgements(hub: Any) -> None:
    """Run the acknowledgements queued in the event loop, which does not run while the pool stops.

    Other callbacks stay queued: one may be the transport's reader, which would deliver more tasks.
    """
    if hub is None:
        return
    ready = hub._pop_ready()
    while ready:
        callback = ready.pop()
        if getattr(getattr(callback, "fun", None), "__name__", "") in {"ack_log_error", "reject_log_error"}:
            try:
                callback()
            except Exception:
                logger.exception("an acknowledgement failed")
        else:
            hub.call_soon(callback)
