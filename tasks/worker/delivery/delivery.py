"""One message, as Celery passes it to the pool, and the ways to settle it; the time limits of its generation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore, Reject
from celery.worker.state import revoked

from petiole.gpu_worker.request import FinishReason
from petiole.tasks.wire.headers import ETA, RETRIES, SENT
from petiole.tasks.wire.keys import NAME_PROPERTY
from petiole.tasks.worker.broker.transport import Channel
from petiole.tasks.worker.output.outcomes import Ending, Outcome


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message. `request` is Celery's Request object."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    accept_callback: Callable[[int, float], object]
    callback: Callable[[tuple[bool, Any, float]], object]
    timeout_callback: Callable[[bool, float], object]
    soft_timeout_s: float | None
    timeout_s: float | None

    @property
    def task_name(self) -> str:
        return str(self.args[0])

    @property
    def task_id(self) -> str:
        return str(self.args[1])

    @property
    def message(self) -> dict[str, Any]:
        """Celery's request dictionary: headers, args, kwargs, delivery_info."""
        return self.args[2]  # type: ignore[no-any-return]

    @property
    def request(self) -> Any:
        return getattr(self.accept_callback, "__self__", None)

    @property
    def retries(self) -> int:
        """How often Celery has retried the task."""
        return RETRIES.of(self.message) or 0

    @property
    def redelivered(self) -> bool:
        """Whether the broker says that the message was given back to its queue before. On Redis this is only a
        hint."""
        return (self.message.get("delivery_info") or {}).get("redelivered") is True

    @property
    def message_name(self) -> str:
        """A name of the message, the same at every delivery. Empty on RabbitMQ, which marks redelivered
        messages."""
        return str((self.message.get("properties") or {}).get(NAME_PROPERTY, ""))

    @property
    def priority_step(self) -> int:
        """The message's priority; on Redis, the priority of the list that it was in."""
        priority = (self.message.get("delivery_info") or {}).get("priority")
        priority = priority if type(priority) is int else 0
        channel = self.request.message.channel
        return int(channel.priority(priority)) if isinstance(channel, Channel) else priority

    def broker_s(self, taken_at: float) -> float | None:
        """Seconds from submission to `taken_at` (of `time.monotonic`), by the producer's clock and this host's.
        None for a task with an eta, and for a message that does not say when it was sent."""
        sent = SENT.of(self.message)
        if sent is None or ETA.of(self.message) is not None:
            return None
        return time.time() - (time.monotonic() - taken_at) - sent

    @property
    def ending(self) -> Ending | None:
        """Why the task ends, if it was revoked or has expired. Changes nothing: only the consumer's thread may
        change Celery's state. (Celery's set `revoked` has expired tasks, too.)"""
        if self.request.ending is None and self.withdrawn:
            return "expired" if self._expired else "revoked"
        return self.request.ending  # type: ignore[no-any-return]

    @property
    def withdrawn(self) -> bool:
        """Whether a task that has not begun was revoked or has expired."""
        return self._expired or self.request.id in revoked

    @property
    def _expired(self) -> bool:
        expires = self.request.expires
        return expires is not None and datetime.now(expires.tzinfo) > expires

    # ------------------------------------------------------------ consumer's thread

    @property
    def held(self) -> bool:
        """Whether the message is still this worker's. It is not after a lost connection or a lost lease."""
        message = self.request.message
        channel = message.channel
        return bool(channel.holds(message.delivery_tag) if isinstance(channel, Channel) else channel.is_open)

    def begun(self) -> None:
        """The request has a place in the engine."""
        channel = self.request.message.channel
        if isinstance(channel, Channel):
            channel.qos.begun(self.request.message.delivery_tag)

    def acknowledge(self) -> None:
        """Acknowledge without a result or event: another delivery reports how the task ended."""
        self._answer(Ignore())

    def requeue(self) -> None:
        """Reject the message and requeue it."""
        self._answer(Reject("given up here", requeue=True))

    def _answer(self, answer: Exception) -> None:
        try:
            raise answer
        except type(answer):
            self.callback((True, ExceptionInfo(), 0.0))


class Messages:
    """The messages of one task that this worker has. A message may come again after a lost connection. `current`
    is the delivery that is answered with the task's outcome. The others are acknowledged. Only the consumer's
    thread calls methods. Other threads read `current`."""

    def __init__(self, delivery: Delivery) -> None:
        self.current = delivery
        self.accepted_at: float | None = None
        self._superseded: list[Delivery] = []

    def add(self, delivery: Delivery) -> bool:
        """The message came again: keep the newer request, and accept it if the older one was accepted. Returns
        False if the newer one is not kept.

        Celery holds a request until its `eta`, so an old request may come after its message was lost. If the
        message has come again before that, the newer request is kept, because a requeued job must give it back.
        """
        if not delivery.held:
            self._superseded.append(delivery)
            return False
        self._superseded.append(self.current)
        self.current = delivery
        if self.accepted_at is not None:
            self.accept(self.accepted_at)
        return True

    def accept(self, at: float) -> None:
        """Report to Celery that the task began at `at` (of `time.monotonic`)."""
        self.accepted_at = at
        self.current.accept_callback(os.getpid(), at)

    def forget(self) -> None:
        """Acknowledge all but the current delivery."""
        for delivery in self._superseded:
            delivery.acknowledge()


Kind = Literal["soft", "request", "hard"]


class Limit(NamedTuple):
    after_s: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The limits of one generation in seconds; None and 0 are no limit.

    All count from admission. The engine ends a generation at the earliest limit, with finish reason `deadline`:

        soft      Celery's `soft_time_limit`    a success with the output so far; Celery logs the limit
        request   its option `deadline_s`       a success with the output so far
        hard      Celery's `time_limit`         a failure, TimeLimitExceeded; no result is stored
    """

    soft_s: float | None
    request_s: float | None
    hard_s: float | None

    @property
    def earliest(self) -> Limit | None:
        """The earliest limit. Of equal limits the first wins, in the order soft, request, hard."""
        given: tuple[tuple[float | None, Kind], ...]
        given = (self.soft_s, "soft"), (self.request_s, "request"), (self.hard_s, "hard")
        return min((Limit(s, kind) for s, kind in given if s), key=lambda limit: limit.after_s, default=None)

    def exceeded(self, kind: Kind, outcome: Outcome) -> float | None:
        """The limit of this kind, if it ended the generation."""
        limit = self.earliest if outcome.finish_reason == FinishReason.DEADLINE else None
        return limit.after_s if limit is not None and limit.kind == kind else None
