"""Watches a task that another delivery generates or completes, while this worker still holds a message of it.

That is a newer attempt, or one that has claimed the completion (see `claims`). Acknowledging the message could
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
from typing import Any, Protocol

from petiole.tasks.app.backend import trying_once
from petiole.tasks.keys import stream_keys
from petiole.tasks.servers import connections
from petiole.tasks.servers.answers import DamagedKey
from petiole.tasks.settings import Settings
from petiole.tasks.worker.completion.claims import completed
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.delivery.mailbox import Mailbox

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the stored result and the state's TTL are read."""

JITTER_S = 0.25
"""By how much the computed time of expiry may vary although the TTL was not refreshed."""


class Surroundings(Protocol):
    """What a job that waits uses of its pool."""

    @property
    def completions(self) -> Completions: ...

    @property
    def mailbox(self) -> Mailbox: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def hub(self) -> Any: ...


class Waiting(Protocol):
    """The job."""

    @property
    def task_id(self) -> str: ...

    @property
    def delivery(self) -> Delivery: ...

    @property
    def pool(self) -> Surroundings: ...

    def leave(self) -> None:
        """Acknowledge the message."""
        ...

    def requeue(self) -> None: ...


class Standby:
    """One job that stands by."""

    def __init__(self, job: Waiting) -> None:
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
            request = self._job.delivery.request
            with trying_once(request.task.backend):
                over, silent = completed(request), self._silent()
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
        except (DamagedKey, ValueError) as error:
            logger.error("task %s: its key %s is damaged: %s", self._job.task_id, state, error)
            return True  # no attempt can go on, and the next one fails
        now = time.monotonic()
        expires_at = now + ttl_ms / 1000
        if ttl_ms > 0 and expires_at > self._expires_at + JITTER_S:
            self._alive_at = now
        self._expires_at = expires_at
        leases = 1 if done else attempts
        return now - self._alive_at > self._job.pool.settings.visibility_timeout_s * leases
