"""One generation task in this worker, from its delivery to its acknowledgement.

    delivered ──begin──► submitted ──► admitted ──► ended ──finish──► finished ──trace──► acknowledged
                            │              │           │                 └ the only way to links and callbacks
                            │              │           └ stale: a newer attempt owns the task; dropped
                            └──────────────┴ handed back: another worker goes on; the message is not acknowledged

Who does what: the intake begins and submits, the engine's text thread reports what it makes, the publisher says
whether the end was ours to write, a completion thread runs Celery's trace, and everything that touches Celery's
request happens on the consumer's thread, in the order in which it was posted. A revoked task is announced by
Celery itself; its trace never runs, so nothing can overwrite REVOKED.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import states
from celery.exceptions import Ignore
from celery.worker.state import revoked

from gpu_worker.errors import EngineError, HandedBack
from gpu_worker.handle import Handle
from gpu_worker.request import Delta, FinishReason, Request
from tasks.worker.attempts import Begun
from tasks.worker.publisher import Stream
from tasks.worker.results import Outcome, at_hand, failed, recorded, succeeded, within
from tasks.worker.started import store_started

if TYPE_CHECKING:
    from tasks.worker.pool import EnginePool

logger = logging.getLogger(__name__)

STORE_AGAIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """What Celery hands to the pool for one message. `request` is its Request object."""

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


class Job:
    """A generation task that this worker has taken. Also the handle that Celery terminates."""

    def __init__(self, pool: EnginePool, delivery: Delivery) -> None:
        self.pool = pool
        self.delivery = delivery
        self.superseded: list[Delivery] = []
        self.task_id = delivery.task_id
        self.taken_at = time.monotonic()
        self.admitted_at: float | None = None
        self.begun: Begun | None = None
        self.handle: Handle | None = None
        self.stream: Stream | None = None
        self.outcome: Outcome | None = None
        self.accepted = self.revoked = self.flagged = self.too_late = self.handing_back = self.over = False
        self._storing = threading.RLock()

    # ------------------------------------------------------------ limits

    @property
    def deadline_s(self) -> float | None:
        """Seconds from admission: the least of Celery's two limits and the request's own."""
        return self._deadline[0]

    asked_deadline_s: float | None = None

    @property
    def _deadline(self) -> tuple[float | None, str]:
        limits = [
            (limit, kind)
            for limit, kind in (
                (self.delivery.soft_timeout_s, "soft"),
                (self.asked_deadline_s, "asked"),
                (self.delivery.timeout_s, "hard"),
            )
            if limit
        ]
        return min(limits, key=lambda pair: pair[0], default=(None, ""))

    # ------------------------------------------------------------ intake

    def begin(self, begun: Begun, *, needs_reader: bool = False) -> Stream:
        self.begun = begun
        self.flagged = bool(begun.cancel)
        publisher = self.pool.publisher
        self.stream = Stream(
            publisher, self.task_id, begun.attempt, begun.written, self, needs_reader=needs_reader
        )
        return self.stream

    def submit(self, request: Request) -> None:
        """Give the request to the engine, and tell it at once what was asked of the job meanwhile."""
        self.handle = self.pool.engine.submit(
            request, on_admitted=self._on_admitted, on_delta=self._on_delta, on_done=self._on_done
        )
        if self.revoked or self.flagged:
            self.handle.cancel()
        if self.handing_back:
            self.handle.hand_back()

    def end(self, outcome: Outcome) -> None:
        """The outcome is known; it counts once the publisher has written it."""
        self.outcome = outcome
        assert self.stream is not None
        self.stream.finish(outcome)

    def replay(self, begun: Begun) -> None:
        """An earlier delivery finished the task: store what was recorded, unless that was stored too."""
        assert begun.record is not None
        self.begun = begun
        self.outcome = recorded(begun.record, begun.written)
        self.pool.run(self._replay)

    # ------------------------------------------------------------ engine's text thread

    def _on_admitted(self, handle: Handle) -> None:
        self.admitted_at = time.monotonic()
        self.too_late = _too_late(self.delivery.request)
        if self.too_late:
            handle.cancel()
        if self.stream is not None:
            self.stream.admit()
        self.pool.mailbox.post(self._accept)

    def _on_delta(self, handle: Handle, delta: Delta) -> None:
        assert self.stream is not None
        self.stream.push(delta)

    def _on_done(self, handle: Handle) -> None:
        assert self.stream is not None
        assert self.begun is not None
        error = handle.error
        if isinstance(error, HandedBack) or (isinstance(error, EngineError) and not self.pool.engine.healthy):
            if self.pool.engine.healthy:
                self.stream.release()
            else:  # this task may be what broke the engine: it stays marked as running, and counts as a death
                self.on_released()
        elif error is not None:
            self.end(failed(error))
        else:
            outcome = succeeded(handle.result(), self.begun.attempt, self.begun.written)
            self.end(within(self.pool.settings.result_max_bytes, outcome))

    # ------------------------------------------------------------ publisher

    def on_finished(self) -> None:
        self.pool.run(self._complete)

    def on_stale(self) -> None:
        logger.warning("task %s: a newer attempt owns it; dropped here", self.task_id)
        self.over = True
        if self.handle is not None:
            self.handle.cancel()
        self.pool.mailbox.post(self._drop)

    def on_released(self) -> None:
        self.over = True
        self.pool.mailbox.post(lambda: None)

    def on_cancel(self, *, flagged: bool) -> None:
        self.flagged = self.flagged or flagged
        if self.handle is not None:
            self.handle.cancel()

    # ------------------------------------------------------------ completion threads

    def _complete(self) -> None:
        """The end is ours: run Celery's trace, which stores the result and sends links and callbacks."""
        assert self.outcome is not None
        limit, kind = self._deadline
        timed_out = self.outcome.finish_reason == FinishReason.DEADLINE
        if self.revoked or self.too_late:
            self.pool.mailbox.post(self._drop)
        elif self.flagged and self.outcome.finish_reason == FinishReason.CANCELLED:
            self.pool.mailbox.post(self._announce)
        elif timed_out and kind == "hard":
            self.pool.mailbox.post(lambda: self._time_out(limit or 0.0))
        else:
            if timed_out and kind == "soft":
                self.pool.mailbox.post(lambda: self.delivery.timeout_callback(True, limit or 0.0))
            self._trace()

    def _trace(self) -> None:
        delivery, outcome = self.delivery, self.outcome
        assert outcome is not None
        with self._storing:
            try:
                with at_hand(self.task_id, outcome):
                    failure, value, _ = delivery.target(*delivery.args)
            except BaseException:  # Reject, or something that Celery lets through: the request knows what to do
                failure, value = True, ExceptionInfo()
            if failure and outcome.result is not None and self._store_again():
                failure, value = False, outcome.result
        runtime_s = time.monotonic() - (self.admitted_at or self.taken_at)
        self.pool.mailbox.post(lambda: self._settle((bool(failure), value, runtime_s)))

    def _store_again(self) -> bool:
        """A success that the backend would not take (it was full, or gone for long) is no failure of the task."""
        request = self.delivery.request
        backend, assumed = request.task.backend, self.outcome
        assert assumed is not None
        give_up_at = time.monotonic() + STORE_AGAIN_S
        while not self.pool.draining and time.monotonic() < give_up_at:
            try:
                if backend.get_task_meta(self.task_id, cache=False)["status"] in states.READY_STATES:
                    return False  # a failure that Celery has stored, such as a callback that could not be sent
                store = not request.ignore_result
                backend.mark_as_done(self.task_id, assumed.result, request._context, store_result=store)
            except Exception as error:
                logger.error("task %s: its result cannot be stored yet: %s", self.task_id, error)
                time.sleep(1.0)
            else:
                return True
        return False

    def _replay(self) -> None:
        """Callbacks are sent before the result is stored, so a stored result means that they were."""
        request = self.delivery.request
        backend = request.task.backend
        stored = backend.get_task_meta(self.task_id, cache=False)
        if stored.get("status") not in states.READY_STATES:
            assert self.begun is not None
            if self.begun.cancel:
                self.pool.mailbox.post(self._announce)
            else:
                self._trace()
            return
        if request.chord:  # counting a header task twice is harmless, not counting it is not
            backend.on_chord_part_return(request._context, stored["status"], stored["result"])
        self.pool.mailbox.post(self._drop)

    def _store_started(self) -> None:
        request = self.delivery.request
        with self._storing:
            if self.outcome is None and not (self.revoked or self.too_late) and not request.ignore_result:
                meta = {"pid": os.getpid(), "hostname": request.hostname}
                store_started(request.task.backend, self.task_id, meta, request._context)

    # ------------------------------------------------------------ consumer's thread

    def rebind(self, delivery: Delivery) -> None:
        """The message came again, after a lost connection: the sequence goes on, for the new request object."""
        self.superseded.append(self.delivery)
        self.delivery = delivery
        if self.accepted:
            delivery.accept_callback(os.getpid(), self.admitted_at or self.taken_at)

    def terminate(self, signum: object = None) -> None:
        """Celery's revoke, or the end of the worker. It has announced what it does with the task itself."""
        if self.over:
            return
        if getattr(self.delivery.request, "_already_cancelled", False):
            self.hand_back()
            return
        first, self.revoked = not self.revoked, True
        if first:
            if not self.accepted:
                self._tell_accepted()
            self.pool.run(lambda: self.pool.flag_cancel(self.task_id))
            if self.handle is not None:
                self.handle.cancel()

    def hand_back(self) -> None:
        """Another worker shall go on. `over` once everything made here is in the log."""
        self.handing_back = True
        if self.handle is not None:
            self.handle.hand_back()
        elif self.stream is None:
            self.over = True

    def _accept(self) -> None:
        if self.accepted or self.over:
            return
        request = self.delivery.request
        if request is not None and request.revoked():  # revoked, or expired, while it waited in the engine
            self.revoked = True
            if self.handle is not None:
                self.handle.cancel()
            return
        self._tell_accepted()
        self.pool.run(self._store_started)

    def _tell_accepted(self) -> None:
        self.accepted = True
        self.delivery.accept_callback(os.getpid(), self.admitted_at or time.monotonic())

    def _settle(self, outcome: tuple[bool, Any, float]) -> None:
        self._forget()
        self.delivery.callback(outcome)

    def _time_out(self, limit_s: float) -> None:
        self._forget()
        self.delivery.timeout_callback(False, limit_s)

    def _announce(self) -> None:
        """The cancel flag ended it, and Celery's own revocation has not come here: say so in its place."""
        if not self.revoked:
            self.revoked = True
            self.delivery.request._announce_revoked("terminated", True, signal.SIGTERM, False)
        self._forget()

    def _drop(self) -> None:
        """Acknowledge without a word: somebody else has said, or will say, how the task ended."""
        self._forget()
        if not self.revoked:
            _acknowledge(self.delivery)

    def _forget(self) -> None:
        self.over = True
        self.pool.forget(self)
        for delivery in self.superseded:
            _acknowledge(delivery)


def _too_late(request: Any) -> bool:
    """Revoked, or expired, while it waited in the engine. Only looks; `_accept` lets Celery announce it."""
    expires = request.expires
    return request.id in revoked or (expires is not None and datetime.now(expires.tzinfo) > expires)


def _acknowledge(delivery: Delivery) -> None:
    try:
        raise Ignore
    except Ignore:
        delivery.callback((True, ExceptionInfo(), 0.0))
