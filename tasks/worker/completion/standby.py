"""Watches a task that another delivery generates or completes, while this worker still holds a message of it.

The other delivery is a newer attempt, or one that has claimed the completion (see `claims`). To acknowledge the
message here could lose the task, because the other delivery may hold no message: it may have lost its message (its
connection was cut, or it paused for longer than its lease) just before it began the attempt. If it dies then, this
message is the only one.

    stale, or claimed ──► standing by ──completed──────────► acknowledged
                             │  └──message lost, too───────► forgotten
                             └──the other shows no life────► requeued: another delivery resumes or completes it

Signs of life: an attempt that writes refreshes the TTL of the task's state. During a long prefill an attempt is
silent. So the patience grows with the number of attempts; otherwise two messages of one task could take it from
each other for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from petiole.tasks.servers import connections
from petiole.tasks.servers.replies import DamagedKey
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker import idempotency
from petiole.tasks.worker.completion.claims import completed
from petiole.tasks.worker.completion.reports import OtherDelivery, Report
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.delivery import Messages
from petiole.tasks.worker.delivery.mailbox import Mailbox

logger = logging.getLogger(__name__)

JITTER_S = 0.25
"""How much the computed time of expiry may vary although the TTL was not refreshed."""


@dataclass(slots=True)
class Standby:
    """One job that stands by. `tell` is called once, when the message need not be held any longer.

    `_expires_at`: when the TTL of the task's state ends. `_alive_at`: the other delivery's last sign of life.
    """

    task_id: str
    messages: Messages
    mailbox: Mailbox
    completions: Completions
    lease_s: float
    tell: Callable[[Report], object]
    _expires_at: float = 0.0
    _alive_at: float = field(default_factory=time.monotonic)

    def watch(self) -> None:
        """Look again in a second, if the message is held. Called on the consumer's thread."""
        if self.messages.current.held:
            self.completions.run_later(self._look)
        else:
            self.messages.current.acknowledge()
            self.tell(OtherDelivery.ANSWERED)

    def _look(self) -> None:
        """Runs on a completion thread."""
        try:
            request = self.messages.current.request
            with idempotency.tried(self.task_id):
                over, silent = completed(request), self._silent()
        except Exception as error:
            logger.debug("task %s: its newer attempt cannot be watched: %s", self.task_id, error)
            self._alive_at = time.monotonic()
            self.mailbox.post(self.watch)
            return
        if over:
            self.tell(OtherDelivery.COMPLETED)
        elif silent:
            logger.warning("task %s: its newer attempt shows no sign of life; requeued", self.task_id)
            self.tell(OtherDelivery.SILENT)
        else:
            self.mailbox.post(self.watch)

    def _silent(self) -> bool:
        """Whether the other delivery shows no life: the TTL of the task's state has not been refreshed for longer
        than one lease times the number of attempts. If the task has ended, one lease is enough: as long as a claim
        is valid."""
        state = stream_keys(self.task_id).state
        try:
            with connections.streams().pipeline(transaction=False) as pipe:
                pipe.pttl(state)
                pipe.hmget(state, "attempt", "done")
                ttl_ms, (attempt, done) = pipe.execute()
            attempts = int(attempt or 1)
        except (DamagedKey, ValueError) as error:
            logger.error("task %s: its key %s is damaged: %s", self.task_id, state, error)
            return True  # no attempt can go on, and the next one fails
        now = time.monotonic()
        expires_at = now + ttl_ms / 1000
        if ttl_ms > 0 and expires_at > self._expires_at + JITTER_S:
            self._alive_at = now
        self._expires_at = expires_at
        leases = 1 if done else attempts
        return now - self._alive_at > self.lease_s * leases
