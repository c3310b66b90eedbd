"""Celery's pool interface, implemented with the engine: `celery -A tasks worker` starts everything.

    consumer ──on_apply──► Job ──intake──► engine ──text thread──► publisher ──► completion threads ──► consumer

There is no thread per task. A generation task becomes a `Job`, and the engine batches all jobs. Other tasks of the
app run on a few threads. `limit` is the number of the engine's slots plus a small look-ahead: the next request is
ready when a slot becomes free, and a worker does not reserve many tasks that an idle one could run.
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

from gpu_worker.errors import InvalidRequest, ModelError
from tasks import connections
from tasks.app import app as petiole
from tasks.definitions import GenerationTask
from tasks.settings import PREFIX, Settings, settings, shared
from tasks.worker import handoff
from tasks.worker.completions import Completions
from tasks.worker.delivery import Delivery
from tasks.worker.engines import EngineLike, load_engine
from tasks.worker.eviction import warn_of_eviction
from tasks.worker.foreign import Deaths, ForeignTasks
from tasks.worker.intake import Intake
from tasks.worker.job import Job
from tasks.worker.mailbox import Mailbox
from tasks.worker.metrics import Reporter
from tasks.worker.publisher import Publisher
from tasks.worker.results import largest
from tasks.worker.tally import Tally

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a shutdown request is checked for while the model loads."""

EX_USAGE = 2
EX_SOFTWARE = 70


class EnginePool(BasePool):  # type: ignore[misc]
    """The pool: one engine and its jobs. `started`: the model is loaded, and the engine and all threads exist."""

    signal_safe = False
    task_join_will_block = True

    engine: EngineLike
    limit: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settings: Settings = settings()
        self.jobs: dict[str, Job] = {}
        self.mailbox = Mailbox()
        self.tally = Tally()
        self.reporter: Reporter | None = None
        self.hub: Any = None
        self.started = self.draining = self.load_abandoned = self.failed = False

    # ------------------------------------------------------------ start

    def on_start(self) -> None:
        """Load the model before the first message is taken."""
        if self.app is not petiole:  # the app of `celery -A` has neither Petiole's transport nor its leases
            logger.critical("Petiole's pool serves its own app, not %r: see docs/celery.md", self.app.main)
            raise WorkerShutdown(EX_USAGE)
        if not shared(backend := str(self.app.conf.result_backend or "disabled")):
            logger.critical("result_backend: must keep results where other processes find them, got %s", backend)
            raise WorkerShutdown(EX_USAGE)
        begun = time.monotonic()
        logger.warning("loading %s", self.settings.model)  # WARNING is Celery's default log level
        self.engine = self._load()
        logger.warning("serving %s after %.1f s", self.settings.model, time.monotonic() - begun)
        self.engine.on_fatal = self.fail
        client = connections.streams()
        self.publisher = Publisher(client, ttl_s=self.settings.stream_ttl_s)
        self.publisher.on_fatal = self.fail
        self.intake = Intake(self, client)
        self.foreign = ForeignTasks(self.mailbox, Deaths(client, self.settings.max_attempts))
        self.completions = Completions(self.app)
        GenerationTask.Request = "tasks.worker.revoking:Request"
        self.result_max_bytes = self.settings.result_max_bytes
        threading.Thread(target=self._ask_servers, name="petiole-limits", daemon=True).start()
        self.publisher.start()
        self.intake.start()
        self.started = True

    def _load(self) -> EngineLike:
        engine = load_engine(self.settings)
        try:
            while not engine.done():
                state.maybe_shutdown()
                wait([engine], LOOK_S)
            return engine.result()
        except (WorkerShutdown, WorkerTerminate):
            logger.warning("%s was not loaded to the end: this worker ends", self.settings.model)
            self.load_abandoned = True
            raise
        except InvalidRequest as error:
            logger.critical("%s%s: %s, got %s", PREFIX, error.field.upper(), error.limit, error.value)
            raise WorkerShutdown(EX_USAGE) from None
        except (ModelError, ImportError, OSError) as error:
            logger.critical("the model cannot be served: %s", " ".join(str(error).split()))
            raise WorkerShutdown(EX_SOFTWARE) from None

    def _ask_servers(self) -> None:
        """Query the servers' limits, on a thread of its own: a server that hangs must not delay a shutdown."""
        self.result_max_bytes = min(self.result_max_bytes, largest(self.app.backend))
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
            soft_timeout or self.options.get("soft_timeout"),
            timeout or self.options.get("timeout"),
        )
        if not isinstance(self.app.tasks.get(delivery.task_name), GenerationTask):
            return self.foreign.apply(delivery)
        job = self.jobs.get(delivery.task_id)
        if job is not None:
            job.rebind(delivery)
            return job
        job = self.jobs[delivery.task_id] = Job(self, delivery)
        if not self.draining:
            self.intake.put(job)
        return job

    def forget(self, job: Job) -> None:
        if self.jobs.get(job.task_id) is job:
            del self.jobs[job.task_id]

    def terminate_job(self, pid: int, signal: object = None) -> None:
        """Does nothing: there are no pool processes, and the handle's `terminate` ends a task."""

    # ------------------------------------------------------------ size

    def grow(self, n: int = 1) -> None:
        self.limit += n

    def shrink(self, n: int = 1) -> None:
        self.limit = max(1, self.limit - n)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        return {
            **info,
            "processes": [os.getpid()],
            "jobs": len(self.jobs),
            "draining": self.draining,
            "streams_behind_s": round(self.publisher.behind_s, 3) if self.started else 0.0,
            "engine": self.engine.stats() if self.started else {},
        }

    # ------------------------------------------------------------ end

    def on_stop(self) -> None:
        """Warm shutdown: finish tasks for up to `drain_seconds`, hand back the rest. Cold: hand back all."""
        cold = bool(state.should_terminate) or not self._serving()
        handoff.hand_off(self, drain_s=0.0 if cold else self.settings.drain_seconds)

    def on_terminate(self) -> None:
        handoff.hand_off(self, drain_s=0.0)

    def close_threads(self) -> None:
        """Stop all threads: the last step of a handoff, when no task runs and all output is in Redis."""
        self.completions.close()
        self.publisher.close()
        if self.reporter is not None:
            self.reporter.stop()
        self.engine.shutdown(drain=False)

    @property
    def abandoned(self) -> bool:
        """Whether threads are left that cannot be stopped: of an unfinished load, or of the app's other tasks."""
        return self.load_abandoned or (self.started and bool(self.foreign.running))

    def _serving(self) -> bool:
        return self.started and self.engine.healthy and not self.failed

    def fail(self, error: BaseException) -> None:
        """End the worker after a fatal error of the engine or a shared thread: its supervisor restarts it, and
        other workers resume its tasks."""
        self.failed = True
        logger.critical("failed: %r; this worker ends", error)
        state.should_stop = EX_SOFTWARE
        hub = self.hub or get_event_loop()
        if hub is not None:
            hub.call_soon(lambda: None)
