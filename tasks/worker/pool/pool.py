"""Celery's pool interface, implemented with the engine: `celery -A tasks worker` starts everything.

    consumer ──on_apply──► job ──intake──► engine ──text thread──► publisher ──► completion threads ──► consumer

There is no thread per task. A generation task becomes a job, and the engine batches all jobs. Other tasks of the
app run on a few threads. `limit` is the number of the engine's places plus a small look-ahead: the next request is
ready when a place becomes free, and a worker does not reserve many tasks that an idle one could run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from celery.concurrency.base import BasePool
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.worker import state
from kombu.asynchronous import get_event_loop

from petiole.gpu_worker.exceptions import InvalidRequest, MachineError, ModelError
from petiole.tasks.app import worker_side
from petiole.tasks.app.application import app as petiole
from petiole.tasks.fleet.reports import GENERATIONS_SHOWN, Generating
from petiole.tasks.servers import connections
from petiole.tasks.servers.eviction import warn_of_eviction
from petiole.tasks.settings import PREFIX, Settings, settings, shared
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.traces import exporting
from petiole.tasks.wire.headers import is_limit
from petiole.tasks.worker.broker.quarantine import quarantine
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.delivery.mailbox import Mailbox
from petiole.tasks.worker.generation import counting
from petiole.tasks.worker.generation.counting import CountingThreads
from petiole.tasks.worker.generation.driver import JobDriver, Services
from petiole.tasks.worker.generation.engines import EngineLike, load_engine
from petiole.tasks.worker.generation.intake import Intake
from petiole.tasks.worker.output.outcomes import largest
from petiole.tasks.worker.output.publisher import Publisher
from petiole.tasks.worker.pool import shutdown
from petiole.tasks.worker.pool.engine_control import EngineControl
from petiole.tasks.worker.pool.foreign_tasks import Deaths, ForeignTasks
from petiole.tasks.worker.pool.shutdown import Serving
from petiole.tasks.worker.reports.histograms import TaskHistograms
from petiole.tasks.worker.reports.reporter import Reporter

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a shutdown request is checked for while the model loads."""

LOOK_AHEAD = 4
"""Tasks that a worker holds beyond the places of its engine, so that a free place is filled at once."""

EX_USAGE = 2
EX_SOFTWARE = 70


class Undecided(int):
    """The default concurrency of a worker: the engine's places and the look-ahead, once the model is loaded."""


class EnginePool(BasePool):  # type: ignore[misc]
    """The pool: one engine and its jobs. `serving` exists once the model is loaded."""

    signal_safe = False
    task_join_will_block = True
    limit: int  # of `BasePool`

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settings: Settings = settings()
        self.serving: Serving | None = None
        self.mailbox = Mailbox()
        self.reporter: Reporter | None = None
        self.counters: CountingThreads | None = None
        self.hub: Any = None
        self.load_abandoned = self.failed = False
        self._result_max_bytes = self.settings.result_max_bytes
        self._begun = 0.0

    @property
    def services(self) -> Services:
        """The services of a pool that has started."""
        assert self.serving is not None
        return self.serving.services

    @property
    def draining(self) -> bool:
        return self.serving is not None and self.serving.draining

    # ------------------------------------------------------------ start

    def on_start(self) -> None:
        """Load the model before the first message is taken."""
        if self.app is not petiole:  # the app of `celery -A` has neither Petiole's transport nor its leases
            logger.critical("Petiole's pool serves its own app, not %r: see docs/celery.md", self.app.main)
            raise WorkerShutdown(EX_USAGE)
        if not shared(backend := str(self.app.conf.result_backend or "disabled")):
            logger.critical("result_backend: must keep results where other processes find them, got %s", backend)
            raise WorkerShutdown(EX_USAGE)
        exporting.start("petiole-worker")
        self._begun = time.monotonic()
        logger.warning("loading %s", self.settings.model)  # WARNING is Celery's default log level
        engine = self._load()
        if isinstance(self.limit, Undecided):
            self.limit = engine.config.max_num_seqs + LOOK_AHEAD
        engine.on_fatal = self.fail
        counting.serve(engine)
        client = connections.streams()
        services = Services(
            self.settings,
            engine,
            Publisher(client, ttl_s=self.settings.stream_ttl_s, on_fatal=self.fail),
            Completions(self.app),
            self.mailbox,
            TaskHistograms(),
            result_max_bytes=lambda: self._result_max_bytes,
        )
        foreign = ForeignTasks(self.mailbox, Deaths(client, self.settings.max_attempts))
        intake = Intake(services, client)
        self.serving = Serving(services, intake, foreign, EngineControl(services, intake, self.fail))
        GenerationTask.Request = worker_side.REQUEST
        threading.Thread(target=self._ask_servers, name="petiole-limits", daemon=True).start()
        quarantine.start(self.app, self.mailbox.post)
        services.publisher.start()
        self.serving.intake.start()
        self.serving.steering.start()

    def say_that_it_serves(self) -> None:
        """For the log, when `petiole status` can show the worker."""
        logger.warning("serving %s after %.1f s", self.settings.model, time.monotonic() - self._begun)
        if (computing := self.services.engine.limits.computing).weight_bytes:
            logger.warning("%s", computing)

    def _load(self) -> EngineLike:
        engine = load_engine(self.settings)
        try:
            while not engine.done():
                state.maybe_shutdown()
                wait([engine], LOOK_S)
            return engine.result()
        except (WorkerShutdown, WorkerTerminate):
            logger.warning("%s was still loading: this worker ends", self.settings.model)
            self.load_abandoned = True
            raise
        except InvalidRequest as error:
            logger.critical("%s%s: %s, got %s", PREFIX, error.field.upper(), error.limit, error.value)
            raise WorkerShutdown(EX_USAGE) from None
        except (ModelError, ImportError, OSError) as error:
            logger.critical("the model cannot be served: %s", " ".join(str(error).split()))
            files = isinstance(error, ModelError) and not isinstance(error, MachineError)
            raise WorkerShutdown(EX_USAGE if files else EX_SOFTWARE) from None

    def _ask_servers(self) -> None:
        """Query the servers' limits, on a thread of its own: a server that hangs must not delay a shutdown."""
        self._result_max_bytes = min(self._result_max_bytes, largest(self.app.backend))
        warn_of_eviction((self.settings.broker_url, self.settings.streams_url))

    def register_with_event_loop(self, loop: Any) -> None:
        self.hub = loop
        self.mailbox.attach(loop)

    # ------------------------------------------------------------ tasks

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        accept_callback: Any = None,
        callback: Any = None,
        timeout_callback: Any = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> Any:
        """Accept one message. Never raises: errors in the message become the task's failure."""
        delivery = Delivery(
            target,
            tuple(args),
            accept_callback,
            callback,
            timeout_callback,
            _limit(soft_timeout) or self.options.get("soft_timeout"),
            _limit(timeout) or self.options.get("timeout"),
        )
        serving = self.serving
        assert serving is not None
        if not isinstance(self.app.tasks.get(delivery.task_name), GenerationTask):
            return serving.foreign.apply(delivery)
        job = self.services.jobs.get(delivery.task_id)
        if job is not None:
            job.rebind(delivery)
            return job
        job = self.services.jobs[delivery.task_id] = JobDriver(self.services, delivery)
        if not serving.draining:
            serving.intake.put(job)
        return job

    def terminate_job(self, pid: int, signal: object = None) -> None:
        """Does nothing: there are no pool processes, and the handle's `terminate` ends a task."""

    def uncompleted(self) -> dict[str, Any]:
        """The tasks that are taken and not completed, as fields of a `WorkerReport`."""
        jobs, now = [driver.job for driver in list(self.services.jobs.values())], time.monotonic()
        oldest = sorted((job for job in jobs if job.outcome is None), key=lambda job: job.taken_at)
        return {
            "pending_completions": sum(job.outcome is not None for job in jobs),
            "oldest_task_s": round(max((now - job.taken_at for job in jobs), default=0.0), 1),
            "generations": [
                Generating(task_id=job.task_id, age_s=round(now - job.taken_at, 1))
                for job in oldest[:GENERATIONS_SHOWN]
            ],
        }

    # ------------------------------------------------------------ size

    def grow(self, n: int = 1) -> None:
        self.limit += n

    def shrink(self, n: int = 1) -> None:
        self.limit = max(1, self.limit - n)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        jobs = [] if self.serving is None else list(self.services.jobs.values())
        return {
            **info,
            "processes": [os.getpid()],
            "jobs": len(jobs),
            "parked": sum(driver.job.parked for driver in jobs),
            "draining": self.draining,
            "streams_behind_s": 0.0 if self.serving is None else round(self.services.publisher.behind_s, 3),
            "engine": {} if self.serving is None else self.services.engine.stats(),
            "expert_tokens": [] if self.serving is None else self.services.engine.expert_tokens(),
        }

    # ------------------------------------------------------------ end

    def on_stop(self) -> None:
        """Warm shutdown: finish tasks for up to `drain_seconds`, hand back the rest. Cold: hand back all."""
        still = self.serving is not None and self.serving.steering.stands_still
        cold = bool(state.should_terminate) or not self._healthy() or still
        self._shut_down(0.0 if cold else self.settings.drain_seconds)

    def on_terminate(self) -> None:
        self._shut_down(0.0)

    def _shut_down(self, drain_s: float) -> None:
        if self.serving is not None and not self.serving.draining:
            if self.counters is not None:
                self.counters.close()
            shutdown.shut_down(self.serving, self.hub, drain_s)
            if self.counters is not None:  # not earlier: this thread completes the tasks that drain
                self.counters.join()
            self.close_threads()

    def close_threads(self) -> None:
        """Stop all threads: the last step of a shutdown, when no task runs and all output is in Redis."""
        services = self.services
        quarantine.close()
        self.mailbox.read()  # acknowledge the tasks that it has stored
        services.completions.close()
        services.publisher.close()
        services.events.close()
        if self.reporter is not None:
            self.reporter.stop()
        services.engine.shutdown(drain=False)

    @property
    def abandoned(self) -> bool:
        """Whether threads are left that cannot be stopped: those of an unfinished load or reload, or of foreign
        tasks."""
        serving = self.serving
        return self.load_abandoned or (
            serving is not None and (bool(serving.foreign.running) or serving.steering.running)
        )

    def _healthy(self) -> bool:
        return self.serving is not None and self.services.engine.healthy and not self.failed

    def fail(self, error: BaseException) -> None:
        """End the worker after a fatal error of the engine or a shared thread: its supervisor restarts it, and
        other workers resume its tasks."""
        self.failed = True
        logger.critical("failed: %r; this worker ends", error)
        state.should_stop = EX_SOFTWARE
        hub = self.hub or get_event_loop()
        if hub is not None:
            hub.call_soon(lambda: None)


def _limit(given: object) -> float | None:
    """A time limit, which the control command `time_limit` may have set to anything."""
    if isinstance(given, int | float) and is_limit(given):
        return given
    if given is not None:
        logger.error(
            "a time limit must be a number of seconds, got a %s: the task has no limit", type(given).__name__
        )
    return None
