"""Shutdown of a worker: finish tasks in time, or hand them back to the queue.

An unacknowledged message goes back to its queue when the channel closes, shortly after the pool has stopped. By
then all generated tokens must be in the log, and the task marked as handed back. So the next worker resumes at the
next token and does not count a death."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from petiole.tasks.worker.generation.driver import Services
from petiole.tasks.worker.generation.intake import Intake
from petiole.tasks.worker.generation.job import State
from petiole.tasks.worker.pool.engine_control import EngineControl
from petiole.tasks.worker.pool.foreign_tasks import ForeignTasks

logger = logging.getLogger(__name__)

HANDBACK_S = 5.0


@dataclass(slots=True)
class Serving:
    """The parts of a pool whose model is loaded."""

    services: Services
    intake: Intake
    foreign: ForeignTasks
    steering: EngineControl
    draining: bool = False

    @property
    def state(self) -> str:
        return "draining" if self.draining else self.steering.state

    @property
    def busy(self) -> bool:
        """Whether a task may still finish here. A task that the intake had not begun will not: the intake is
        closed."""
        return bool(self.foreign.running) or any(job.busy for job in self.services.jobs.values())


def shut_down(serving: Serving, hub: Any, drain_s: float) -> None:
    """Drain for up to `drain_s`, then hand back. Runs on the consumer's thread. `hub` is kombu's event loop."""
    services, foreign = serving.services, serving.foreign
    wait, jobs = services.mailbox.wait, services.jobs
    serving.draining = True
    serving.steering.close()
    serving.intake.close()
    began = time.monotonic()
    if services.engine.healthy and serving.busy:
        logger.info("finishing %s, for %.0f s at most", _tasks(len(jobs) + len(foreign.running)), drain_s)
        wait(lambda: not serving.busy, drain_s, lambda: run_acknowledgements(hub))
    cut_off = foreign.close()
    unfinished = list(jobs.values())
    for job in unfinished:
        job.hand_back()
    wait(lambda: all(job.job.over for job in jobs.values()), HANDBACK_S, lambda: run_acknowledgements(hub))
    given_back = sum(job.job.state is not State.SETTLED for job in unfinished) + cut_off  # some ended meanwhile
    if given_back:
        logger.info("gave %s back after %.1f s", _tasks(given_back), time.monotonic() - began)


def _tasks(number: int) -> str:
    return "1 task" if number == 1 else f"{number} tasks"


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
