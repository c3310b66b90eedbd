"""One message, as Celery passes it to the pool, and the ways to settle it; the time limits of its generation, and
its revocation.

Revoked and expired tasks end like others: first in their stream, then in Celery's result backend. In stock Celery,
every worker that learns of a revocation stores REVOKED: the worker that has the task, and each other worker that
finds no stored state. That has three faults here. The stream, possibly begun by another worker, gets no last
delta. The task may be about to succeed. And if its worker dies before the acknowledgement, the next worker, which
never received the revocation, completes the task as a success.

So here a request only records the revocation. Its job writes the last delta, which only the attempt that owns the
task can do, and then lets Celery announce the revocation. On `terminate`, a worker that does not have the task
sets the cancel flag for the worker that gets it."""

from __future__ import annotations

import logging
import os
import signal as signals
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple

from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore, Reject
from celery.utils.functional import maybe_list
from celery.worker import state as known
from celery.worker.control import control_command, time_limit as stock_time_limit
from celery.worker.request import Request as StockRequest
from celery.worker.state import revoked

from petiole.gpu_worker.request import FinishReason
from petiole.tasks.fleet import control
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


logger = logging.getLogger(__name__)

AT_ONCE = 500


class Request(StockRequest):  # type: ignore[misc]
    ending: Ending | None = None

    def revoked(self) -> bool:
        """Returns False: even a revoked task is taken, and its job ends the stream."""
        if self.ending is None:
            super().revoked()
        return False

    def _announce_revoked(self, reason: str, terminated: bool, signum: int | None, expired: bool) -> None:
        self.ending = "expired" if expired else "revoked"

    def terminate(self, pool: Any, signal: object = None) -> None:
        self.ending = self.ending or "revoked"
        if self._apply_result is not None and (job := self._apply_result()) is not None:
            job.stop(self.ending)
        else:  # it waits for its eta or a rate limit, and another worker may get it meanwhile
            pool.services.completions.run(lambda: control.flag_cancel(self.id))

    def announce(self, ending: str, *, running: bool) -> None:
        """Store the state REVOKED, send event and signal, and acknowledge the message."""
        if ending == "revoked" and running:
            super()._announce_revoked("terminated", True, signals.SIGTERM, False)
        else:
            super()._announce_revoked(ending, False, None, ending == "expired")


def _note(consumer: Any, ids: Sequence[str]) -> None:
    """Celery's set takes some microseconds for each id. So of thousands, some hundred are added in each turn of
    the event loop: other messages wait for no more."""
    known.revoked.update(ids[:AT_ONCE])
    if rest := ids[AT_ONCE:]:
        consumer.hub.call_soon(consumer.pool.services.mailbox.post, partial(_note, consumer, rest))


@control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(
    state: Any, task_id: Any, terminate: bool = False, signal: object = None, **_: object
) -> dict[str, str]:
    """Revoke task by task id (or list of ids)."""
    ids = set(maybe_list(task_id) or ())
    _note(state.consumer, list(ids))
    if not terminate:
        logger.info("revoked: %s", ", ".join(ids))
        return {"ok": f"tasks {ids} flagged as revoked"}
    pool = state.consumer.pool
    held = [one for one in ids if one in known.requests]
    for one in held:
        logger.info("terminating %s", one)
        known.requests[one].terminate(pool, signal)
    if others := ids.difference(held):
        pool.services.completions.run(lambda: control.flag_cancel(*others))
    return {"ok": f"terminate: {', '.join(held) or 'tasks unknown'}"}


@control_command(  # type: ignore[untyped-decorator]
    variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]"
)
def terminate(state: Any, signal: object, task_id: Any, **_: object) -> dict[str, str]:
    """Terminate task by task id (or list of ids)."""
    return revoke(state, task_id, terminate=True, signal=signal)  # type: ignore[no-any-return]


@control_command(  # type: ignore[untyped-decorator]
    args=[("task_name", str), ("soft", float), ("hard", float)],
    signature="<task_name> <soft_secs> [hard_secs]",
)
def time_limit(
    state: Any, task_name: str | None = None, hard: float | None = None, soft: float | None = None, **_: object
) -> Any:
    """Tell worker(s) to modify the time limit for task by type.

    Unlike a stock worker, which replies that it did so but keeps the old limits, this worker changes them.
    """
    reply = stock_time_limit(state, task_name, hard, soft)
    state.consumer.update_strategies()  # new requests read their limits from the strategies
    return reply
