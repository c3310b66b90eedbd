"""The thread that takes jobs from delivery to the engine: parse the arguments, begin the attempt, submit.

It is a separate thread because it waits for Redis and may parse megabytes. One script call begins up to 64 queued
jobs. While Redis is unreachable no task is admitted: the jobs wait here, at most as many as the pool may hold.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable
from typing import TypeVar

import redis

from petiole.tasks.errors import InvalidRequest, ModelChanged, PetioleError, WorkersLost
from petiole.tasks.requests.schemas import Common, stream_keys
from petiole.tasks.servers.connections import LOST
from petiole.tasks.servers.masters import caused_by_call
from petiole.tasks.submission.parsing import parse
from petiole.tasks.urls import RABBITMQ, scheme
from petiole.tasks.worker import scripts
from petiole.tasks.worker.generation.attempts import Begun
from petiole.tasks.worker.generation.images import images_of, stored
from petiole.tasks.worker.generation.job import Job
from petiole.tasks.worker.generation.requests import engine_request
from petiole.tasks.worker.generation.workplace import Workplace
from petiole.tasks.worker.output.outcomes import Outcome, ended, failed, unreadable
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

T = TypeVar("T")
Read = tuple[Common, list[bytes]] | PetioleError
"""A task's request and its images, or why there is none."""

_JOBS_A_CALL = 64


class Intake:
    """The thread that begins attempts."""

    def __init__(self, pool: Workplace, client: redis.Redis) -> None:
        self._pool = pool
        self._client = client
        self._begin = scripts.load(client, "begin")
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petiole-intake", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """Stop the thread. Queued jobs were never begun; their messages go back unchanged."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._take(batch)
            except Exception as error:  # of this module: none of these tasks may be held for ever
                logger.exception("intake: %d tasks could not be begun", len(batch))
                for job in batch:
                    if job.outbox is None and job.outcome is None:
                        job.fail(error)
            del batch  # jobs that have ended are not kept until the next batch

    def _next_batch(self) -> list[Job]:
        """Wait for jobs, and take all that are queued, up to a call's worth. Empty when closed."""
        batch: list[Job] = []
        while len(batch) < _JOBS_A_CALL:
            try:
                job = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if job is None or self._closing.is_set():
                return []
            batch.append(job)
        return batch

    def _take(self, batch: list[Job]) -> None:
        requests, room = self._read_all(batch), self._room()
        replies = self._begin_each(batch, room, call=uuid.uuid4().hex)
        for position, (job, reply) in enumerate(zip(batch, replies, strict=False)):
            if isinstance(reply, Exception):
                job.fail(reply)
                continue
            try:
                self._start(job, requests[job], Begun.parse(reply), marked=position < room)
            except Exception as error:
                if job.outbox is None:
                    job.give_up()
                else:
                    logger.exception("task %s could not be submitted", job.task_id)
                    job.end(failed(error))

    def _read_all(self, batch: list[Job]) -> dict[Job, Read]:
        requests = {job: self._read(job) for job in batch}
        asked = [request for request in requests.values() if isinstance(request, Common)]
        ttl_s = self._pool.settings.image_ttl_s
        known = self._patiently(lambda: stored(self._client, asked, ttl_s), len(batch)) or {}
        return {job: self._with_images(request, known) for job, request in requests.items()}

    def _with_images(self, request: Common | PetioleError, known: dict[str, bytes]) -> Read:
        try:
            return (request, images_of(request, known)) if isinstance(request, Common) else request
        except PetioleError as error:
            return error

    def _read(self, job: Job) -> Common | PetioleError:
        message = job.delivery.message
        try:
            return parse(job.delivery.task_name, message["args"], message["kwargs"])
        except PetioleError as error:
            return error
        except Exception as error:
            return InvalidRequest("kwargs", "must be the options of this task", repr(error))

    def _begin_each(self, batch: list[Job], room: int, call: str) -> list[list[object] | Exception]:
        """A reply for each job. If they cannot be begun together because of one, only that one fails."""
        try:
            return [*self._begin_all(batch, room, call)]
        except Exception as error:
            if len(batch) == 1:
                logger.exception("task %s cannot be begun", batch[0].task_id)
                return [error]
        return [
            reply
            for position, job in enumerate(batch)
            for reply in self._begin_each([job], int(position < room), call)
        ]

    def _begin_all(self, batch: list[Job], room: int, call: str) -> list[list[object]]:
        keys = [key for job in batch for key in _log_and_state(job.task_id)]
        head = self._pool.publisher.ttl_ms, self._pool.engine.limits.fingerprint, room, call
        facts = [fact for job in batch for fact in _facts(job)]
        replies: list[list[object]] | None = self._patiently(
            lambda: self._begin(keys, [*head, *facts]), len(batch)
        )
        return replies or []

    def _patiently(self, call: Callable[[], T], n_tasks: int) -> T | None:
        """What `call` returns once Redis answers; None when closed. Raises what the call itself has caused."""
        reported = False
        while not self._closing.is_set():
            try:
                value = call()
                if reported:
                    logger.warning("intake: Redis answers again")
                return value
            except (*LOST, redis.RedisError) as error:
                if caused_by_call(error):
                    raise
                if not reported:
                    logger.error("intake: Redis does not answer (%s); %d tasks wait", error, n_tasks)
                    reported = True
                self._closing.wait(0.5)
        return None

    def _room(self) -> int:
        """How many more tasks the engine has places for."""
        begun = sum(job.outbox is not None and not job.over for job in list(self._pool.jobs.values()))
        return max(0, self._pool.engine.config.max_num_seqs - begun)

    def _start(self, job: Job, read: Read, begun: Begun | None, *, marked: bool) -> None:
        if begun is None:
            job.on_damaged()
            return
        pool = self._pool
        model = pool.engine.limits.fingerprint
        verdict = begun.verdict(model=model, max_attempts=pool.settings.max_attempts)
        request, images = (read, []) if isinstance(read, PetioleError) else read
        if isinstance(request, Common):
            job.request_deadline_s = request.deadline_s
        if verdict == "finished":
            job.replay(begun)
            return
        if begun.attempt > 1:
            incidents.count("resumed_attempts")
        deadline = job.limits.earliest
        needs_reader = isinstance(request, Common) and request.cancel_on_disconnect
        job.begin(begun, needs_reader=needs_reader, marked=marked)
        if begun.attempt == 1 and (seconds := job.delivery.broker_s(job.taken_at)) is not None:
            pool.tally.waited(job.delivery.priority_step, seconds)
        if job.ending is not None:
            job.end(ended(job.ending))
        elif isinstance(request, PetioleError):
            job.end(failed(request))
        elif verdict == "unreadable":
            job.end(unreadable(begun.written))
        elif verdict == "poisoned":
            job.end(Outcome(error=WorkersLost(begun.deaths, begun.written.text)))
        elif verdict == "model_changed":
            written = f"{len(begun.written.token_ids)} tokens were generated by model {begun.model}"
            job.end(failed(ModelChanged(f"{written}; this worker serves model {model}")))
        else:
            job.submit(
                engine_request(
                    job.task_id,
                    request,
                    images=images,
                    priority=_priority(job),
                    deadline_s=None if deadline is None else deadline.after_s,
                    resume_token_ids=begun.written.token_ids,
                    resume_bins=begun.written.bins,
                    resume_adapter_key=(begun.adapter or None) if begun.written.token_ids else None,
                )
            )


def _log_and_state(task_id: str) -> tuple[str, str]:
    keys = stream_keys(task_id)
    return keys.log, keys.state


def _facts(job: Job) -> tuple[int, str, int]:
    """What `begin.lua` is told of a job: Celery's retries, the message's name, whether it is redelivered."""
    delivery = job.delivery
    retries = delivery.message.get("retries")
    return retries if type(retries) is int else 0, delivery.message_name, int(delivery.redelivered)


def _priority(job: Job) -> int:
    """The engine's priority: the lowest number runs first, as on Redis. On RabbitMQ the highest does."""
    priority = (job.delivery.message.get("delivery_info") or {}).get("priority")
    if type(priority) is not int:
        return 0
    return -priority if scheme(job.pool.settings.broker_url) in RABBITMQ else priority
