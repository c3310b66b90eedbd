"""The thread that takes jobs from delivery to the engine: parse the arguments, begin the attempt, submit.

It is a separate thread because it waits for Redis and may parse megabytes. One script call begins up to 64 queued
jobs. While Redis is unreachable no task is admitted: the jobs wait here, at most as many as the pool may hold.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

import redis

from petiole.contract.requests.generation import Common
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.contract.tasks import TASKS
from petiole.gpu_worker.models.adapters.files import is_below
from petiole.gpu_worker.request import Request
from petiole.tasks.errors import InvalidRequest, PetioleError
from petiole.tasks.servers.connections import LOST
from petiole.tasks.servers.failover import caused_by_call
from petiole.tasks.settings import PREFIX, Settings
from petiole.tasks.submission.options import parse
from petiole.tasks.wire.headers import Account
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker import scripts
from petiole.tasks.worker.delivery.delivery import TimeLimits
from petiole.tasks.worker.generation.attempts import BeginReply
from petiole.tasks.worker.generation.driver import JobDriver, Services
from petiole.tasks.worker.generation.engine_requests import engine_request, images_of, stored
from petiole.tasks.worker.outage import Outage
from petiole.tasks.worker.output.outcomes import Outcome, failed
from petiole.tasks.worker.reports.facts import model_name
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

T = TypeVar("T")
_JOBS_A_CALL = 64


class Intake:
    """The thread that begins attempts."""

    def __init__(self, services: Services, client: redis.Redis) -> None:
        self._services = services
        self._client = client
        self._highest_first = scheme(services.settings.broker_url) in RABBITMQ
        self._begin, self._remodel = scripts.load(client, "begin"), scripts.load(client, "remodel")
        self._beginning = threading.Lock()
        self._queue: queue.SimpleQueue[JobDriver | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        failing, recovered = "intake: Redis does not answer (%s); %d tasks wait", "intake: Redis answers again"
        self._outage = Outage(logger, failing, recovered)
        self._thread = threading.Thread(target=self._run, name="petiole-intake", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: JobDriver) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """Stop the thread. Queued jobs were never begun; their messages go back unchanged."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def record_model(self) -> None:
        """After a reload: record the engine's new model as the model of all tasks that run here, but for those
        that are not continued with it: another model has answered some of their texts."""
        with self._beginning:  # attempts begin with the new model from now on
            jobs = list(self._services.jobs.values())
            begun = {job.task_id: job.attempt.begun.attempt for job in jobs if job.attempt and _continued(job)}
            keys = [stream_keys(task_id).state for task_id in begun]
            arguments = [self._services.engine.limits.fingerprint, *begun.values()]
            if begun:
                self._patiently(lambda: self._remodel(keys, arguments), len(begun))

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                with self._beginning:
                    self._take(batch)
            except Exception as error:  # a fault of this module must not hold these tasks for ever
                logger.exception("intake: %d tasks could not be begun", len(batch))
                for job in batch:
                    job.fail(error)
            del batch  # jobs that have ended are not kept until the next batch

    def _next_batch(self) -> list[JobDriver]:
        """Wait for jobs, and take all that are queued, up to a call's worth. Empty when closed."""
        batch: list[JobDriver] = []
        while len(batch) < _JOBS_A_CALL:
            try:
                job = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if job is None or self._closing.is_set():
                return []
            batch.append(job)
        return batch

    def _take(self, batch: list[JobDriver]) -> None:
        asked, room = [self._read(job) for job in batch], self._room()
        for job in batch:
            job.trace(self._model)
        requests, ttl_s = [one for one in asked if isinstance(one, Common)], self._services.settings.image_ttl_s
        images = self._patiently(lambda: stored(self._client, requests, ttl_s), len(batch)) or {}
        replies = self._begin_each(batch, room, call=uuid.uuid4().hex)
        for position, (job, request, reply) in enumerate(zip(batch, asked, replies, strict=False)):
            if isinstance(reply, Exception):
                job.fail(reply)
                continue
            try:
                self._start(job, request, images, BeginReply.parse(reply), marked=position < room)
            except Exception as error:
                logger.exception("task %s cannot be started", job.task_id)
                job.fault(error)

    def _read(self, job: JobDriver) -> Common | PetioleError:
        """The request of a message. The gate has checked the message's form, but its options may be another
        version's, or wrong. The error has no traceback: frames that know the error would keep the batch."""
        delivery = job.messages.current
        try:
            return parse(delivery.task_name, delivery.message["args"], delivery.message["kwargs"])
        except PetioleError as error:
            return error.with_traceback(None)
        except Exception as error:
            return InvalidRequest("kwargs", "must be the options of this task", repr(error))

    def _begin_each(self, batch: list[JobDriver], room: int, call: str) -> list[list[object] | Exception]:
        """A reply for each job. If the jobs cannot be begun together because of one, only that one fails."""
        try:
            return [*self._begin_all(batch, room, call)]
        except Exception as error:
            if len(batch) == 1:
                logger.exception("task %a cannot be begun", batch[0].task_id)
                return [error]
        return [
            reply
            for position, job in enumerate(batch)
            for reply in self._begin_each([job], int(position < room), call)
        ]

    def _begin_all(self, batch: list[JobDriver], room: int, call: str) -> list[list[object]]:
        keys = [key for job in batch for key in stream_keys(job.task_id).of_begin]
        worker = batch[0].messages.current.request.hostname
        head = self._services.publisher.ttl_ms, self._services.engine.limits.fingerprint, room, call, worker
        facts = [fact for job in batch for fact in _facts(job)]
        replies: list[list[object]] | None = self._patiently(
            lambda: self._begin(keys, [*head, *facts]), len(batch)
        )
        return replies or []

    def _patiently(self, call: Callable[[], T], n_tasks: int) -> T | None:
        """The result of `call` once Redis answers; None if the intake is closed first. Raises errors that the call
        itself causes."""
        while not self._closing.is_set():
            try:
                value = call()
                self._outage.ended()
                return value
            except (*LOST, redis.RedisError) as error:
                if caused_by_call(error):
                    raise
                self._outage.began(error, n_tasks)
                self._closing.wait(0.5)
        return None

    def _room(self) -> int:
        """How many more tasks the engine has places for."""
        placed = sum(job.placed for job in list(self._services.jobs.values()))
        return max(0, self._services.engine.config.max_num_seqs - placed)

    def _start(
        self,
        job: JobDriver,
        asked: Common | PetioleError,
        images: Mapping[str, bytes],
        begun: BeginReply | None,
        *,
        marked: bool,
    ) -> None:
        if begun is None:
            job.listener.on_damaged()
            return
        services, delivery = self._services, job.messages.current
        request = asked if isinstance(asked, Common) else None
        limits = TimeLimits(delivery.soft_timeout_s, request.deadline_s if request else None, delivery.timeout_s)
        model, max_attempts = services.engine.limits.fingerprint, services.settings.max_attempts
        outcome = begun.outcome(model=model, max_attempts=max_attempts)
        if outcome is not None and begun.record is not None:
            job.replay(outcome, limits)
            return
        if begun.attempt > 1:
            incidents.count("resumed_attempts")
        elif (seconds := delivery.broker_s(job.job.taken_at)) is not None:
            services.tally.waited(delivery.priority_step, seconds)
        if request is not None and (wrong := _wrong(request, services.settings)):
            asked = wrong
        if isinstance(asked, PetioleError):
            start: Request | Outcome = failed(asked)
        else:
            start = outcome or self._request(job, asked, images, begun, limits)
        needs_reader = request is not None and request.cancel_on_disconnect
        ttl_s = None if request is None else request.stream_ttl_s
        account = self._account(job, request)
        if job.spans is not None:
            job.spans.begin(begun.attempt, begun.before, died=begun.died, marked=marked)
            if request is not None:
                job.spans.asks(request, content=services.settings.trace_content)
        job.begin(begun, start, limits, needs_reader=needs_reader, marked=marked, ttl_s=ttl_s, account=account)

    def _request(
        self,
        job: JobDriver,
        request: Common,
        images: Mapping[str, bytes],
        begun: BeginReply,
        limits: TimeLimits,
    ) -> Request | Outcome:
        """The engine's request, or the task's failure if its options are invalid."""
        written = begun.written
        try:
            job.presentation = self._services.presentations.now()
            return engine_request(
                job.task_id,
                request,
                presentation=job.presentation,
                images=images_of(request, images),
                priority=self._priority(job),
                deadline_s=None if limits.earliest is None else limits.earliest.after_s,
                resume_token_ids=written.token_ids,
                resume_bins=written.entries("bins"),
                resume_prompt_tokens=len(written.entries("prompt_logprobs")),
                resume_adapter_key=(begun.adapter or None) if written.deltas else None,
                resume_fingerprint=(begun.model or None) if written.token_ids else None,
            )
        except PetioleError as error:
            return failed(error)
        except Exception as error:
            logger.exception("task %s could not be submitted", job.task_id)
            return failed(error)

    @property
    def _model(self) -> str:
        """What the model is called."""
        return model_name(self._services.settings, self._services.engine.limits.model)

    def _account(self, job: JobDriver, request: Common | None) -> Account:
        """How the task is entered in the ledger."""
        settings, model = self._services.settings, self._model
        adapter = getattr(request, "adapter", None) or ""
        message = job.messages.current.message
        return Account.of(message, model=model, adapter=adapter, days=settings.usage_days)

    def _priority(self, job: JobDriver) -> int:
        """The engine's priority, where the lowest number runs first, as on Redis. On RabbitMQ the highest comes
        first."""
        priority = (job.messages.current.message.get("delivery_info") or {}).get("priority")
        if type(priority) is not int:
            return 0
        return -priority if self._highest_first else priority


def _continued(job: JobDriver) -> bool:
    """Whether the engine continues a task after a reload."""
    by_text = TASKS[job.messages.current.task_name].by_text
    return job.attempt is not None and job.placed and not (by_text and job.attempt.outbox.end)


def _facts(job: JobDriver) -> tuple[int, str, int, str]:
    """The arguments of `begin.lua` for a job: Celery's retries, the message's name, whether it is redelivered, its
    span."""
    delivery, span = job.messages.current, "" if job.spans is None else job.spans.traceparent
    return delivery.retries, delivery.message_name, int(delivery.redelivered), span


def _wrong(request: Common, settings: Settings) -> InvalidRequest | None:
    """The error of a request whose stream or result would be kept longer than the settings allow, or whose adapter
    they do not name."""
    for name in ("stream_ttl_s", "result_expires_s"):
        value, most = getattr(request, name), getattr(settings, name)
        if value is not None and value > most:
            return InvalidRequest(name, f"must be at most {PREFIX}{name.upper()}, {most}", value)
    adapter = getattr(request, "adapter", None)
    if adapter is not None and not is_below(adapter, settings.adapter_places):
        where = f"{PREFIX}LORA_FILES or {PREFIX}SERVED_ADAPTERS of the workers"
        return InvalidRequest("adapter", f"must be, or lie below, what {where} names", adapter)
    return None
