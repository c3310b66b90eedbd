"""Watches a task that another delivery generates or completes, while this worker still holds a message of it.

That is a newer attempt, or one that has claimed the completion (see `completing`). Acknowledging the message could
lose the task: the other may hold no message. It may have lost it (its connection was cut, or it paused for longer
than its lease) just before it began the attempt. If it dies then, this message is the only one.

    stale, or claimed ──► standing by ──completed──────────► acknowledged
                             │  └──message lost, too───────► forgotten
                             └──the other shows no life────► requeued: another delivery resumes or completes it

Life: an attempt that writes refreshes the TTL of the task's state. It is silent during a long prefill, so the
patience grows with the number of attempts: two messages of one task do not take it from each other for ever.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import redis

from tasks import connections
from tasks.masters import wrong_type
from tasks.schemas import stream_keys
from tasks.worker.completing import completed

if TYPE_CHECKING:
    from tasks.worker.job import Job

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the stored result and the state's TTL are read."""

JITTER_S = 0.25
"""By how much the computed time of expiry may vary although the TTL was not refreshed."""


class Standby:
    """One job that stands by."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._expires_at = 0.0
        self._alive_at = time.monotonic()

    def watch(self) -> None:
        """Look again in `LOOK_S`, if the message is held. Called on the consumer's thread."""
        job = self._job
        if not job.delivery.held:
            job.leave()
        else:
            job.pool.hub.call_later(LOOK_S, lambda: job.pool.completions.run(self._look))

    def _look(self) -> None:
        """Runs on a completion thread."""
        post = self._job.pool.mailbox.post
        try:
            over, silent = completed(self._job.delivery.request), self._silent()
        except Exception as error:
            logger.debug("task %s: its newer attempt cannot be watched: %s", self._job.task_id, error)
            self._alive_at = time.monotonic()
            post(self.watch)
            return
        if over:
            post(self._job.leave)
        elif silent:
            logger.warning("task %s: its newer attempt shows no sign of life; requeued", self._job.task_id)
            post(self._job.requeue)
        else:
            post(self.watch)

    def _silent(self) -> bool:
        """Whether the TTL of the task's state has not been refreshed for longer than one lease an attempt, or for
        longer than one lease since the task ended: as long as a claim to complete it is valid."""
        state = stream_keys(self._job.task_id).state
        try:
            with connections.streams().pipeline(transaction=False) as pipe:
                pipe.pttl(state)
                pipe.hmget(state, "attempt", "done")
                ttl_ms, (attempt, done) = pipe.execute()
            attempts = int(attempt or 1)
        except (redis.ResponseError, ValueError) as error:
            if isinstance(error, redis.ResponseError) and not wrong_type(error):
                raise
            logger.error("task %s: its key %s is damaged: %s", self._job.task_id, state, error)
            return True  # no attempt can go on, and the next one fails
        now = time.monotonic()
        expires_at = now + ttl_ms / 1000
        if ttl_ms > 0 and expires_at > self._expires_at + JITTER_S:
            self._alive_at = now
        self._expires_at = expires_at
        leases = 1 if done else attempts
        return now - self._alive_at > self._job.pool.settings.visibility_timeout_s * leases
