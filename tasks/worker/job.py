"""One generation task in this worker, from its delivery to its acknowledgement.

    delivered ──begin──► submitted ──► admitted ──► ended ──finish──► finished ──trace──► acknowledged
                            │              │           │                 └ the only way to links and callbacks
                            │              │           └ stale: a newer attempt owns the task; dropped
                            └──────────────┴ handed back: another worker goes on; the message is not acknowledged

    at any time, if something happens that should not: given up; the next delivery goes on, or completes what has
    ended

Who does what: the intake begins and submits, the engine's text thread reports what it makes, the publisher says
whether the end was ours to write, a completion thread runs Celery's trace, and everything that touches Celery's
request happens on the consumer's thread, in the order in which it was posted. What a task's last delta says is
what is stored for it, whichever delivery comes to store it: REVOKED, a failure or a result.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import states

from gpu_worker.errors import EngineError, HandedBack
from gpu_worker.handle import Handle
from gpu_worker.request import Delta, FinishReason, Request
from tasks import fleet
from tasks.worker.attempts import Begun
from tasks.worker.delivery import Delivery
from tasks.worker.publisher import Stream
from tasks.worker.results import Outcome, Success, at_hand, ended, failed, recorded, succeeded, within
from tasks.worker.revoking import Ending
from tasks.worker.started import store_started

if TYPE_CHECKING:
    from tasks.worker.pool import EnginePool

logger = logging.getLogger(__name__)

STORE_AGAIN_S = 300.0

FEW_LOGPROBS = 1_000
"""Positions. More, and a result may be megabytes: many of them in one call would stop Redis for a while."""


GIVE_UP_S = 1.0
"""Until a message whose task was given up goes back to its queue: it may be met by the same again."""


def _or_give_up(step: Callable[..., None]) -> Callable[..., None]:
    """A step of a job. One that raises must not leave its task with this worker for as long as that lives."""

    @wraps(step)
    def tried(job: Job, *args: Any) -> None:
        try:
            step(job, *args)
        except Exception:
            job.give_up()

    return tried


class Job:
    """A generation task that this worker has taken. Also the handle that Celery terminates."""

    def __init__(self, pool: EnginePool, delivery: Delivery) -> None:
        self.pool = pool
        self.delivery = delivery
        self.superseded: list[Delivery] = []
        self.task_id = delivery.task_id
        self.taken_at = time.monotonic()
        self.asked_deadline_s: float | None = None
        self.admitted_at: float | None = None
        self.begun: Begun | None = None
        self.handle: Handle | None = None
        self.stream: Stream | None = None
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self.accepted = self.handing_back = self.over = False
        self._storing = threading.RLock()

    # ------------------------------------------------------------ limits

    @property
    def deadline_s(self) -> float | None:
        """Seconds from admission: the least of Celery's two limits and the request's own."""
        return self._deadline[0]

    @property
    def _deadline(self) -> tuple[float | None, str]:
        """That limit, and which one it is; of equal ones, the gentler."""
        delivery = self.delivery
        limits = (
            (delivery.soft_timeout_s, "soft"),
            (self.asked_deadline_s, "asked"),
            (delivery.timeout_s, "hard"),
        )
        return min(((s, kind) for s, kind in limits if s), key=lambda pair: pair[0], default=(None, ""))

    def give_up(self) -> None:
        """On any thread. Counts as a death of the worker, unless the task has ended."""
        logger.error("task %s is given up here", self.task_id, exc_info=sys.exception())
        self.over = True
        if self.stream is not None:
            self.stream.drop()
        if self.handle is not None:
            self.handle.cancel()
        self.pool.mailbox.post(self._requeue)

    # ------------------------------------------------------------ intake

    def begin(self, begun: Begun, *, needs_reader: bool, marked: bool) -> None:
        """`marked`: as running, by the script that began it."""
        self.begun = begun
        self.ending = "revoked" if begun.cancel else self.ending or self.delivery.ending
        publisher = self.pool.publisher
        self.stream = Stream(
            publisher, self.task_id, begun.attempt, begun.written, self, needs_reader=needs_reader, marked=marked
        )

    def submit(self, request: Request) -> None:
        """Give the request to the engine, and tell it at once what was asked of the job meanwhile."""
        self.handle = self.pool.engine.submit(
            request, on_admitted=self._on_admitted, on_delta=self._on_delta, on_done=self._on_done
        )
        if self.ending is not None:
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
        self.outcome = recorded(begun.record, begun.written)
        self.pool.completions.run(self._replay)

    # ------------------------------------------------------------ engine's text thread

    def _on_admitted(self, handle: Handle) -> None:
        self.admitted_at = time.monotonic()
        self.ending = self.ending or self.delivery.ending
        if self.ending is not None:
            handle.cancel()
        if self.stream is not None:
            self.stream.admit(handle.adapter_key or "")
        self.pool.mailbox.post(self._accept)

    def _on_delta(self, handle: Handle, delta: Delta) -> None:
        assert self.stream is not None
        self.stream.push(delta)

    @_or_give_up
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
            if self.ending is not None and outcome.finish_reason == FinishReason.CANCELLED:
                outcome = ended(self.ending)
            elif not self._timed_out(outcome):
                outcome = within(self.pool.result_max_bytes, outcome)
            self.end(outcome)

    # ------------------------------------------------------------ publisher

    def on_finished(self) -> None:
        assert self.outcome is not None
        self.pool.tally.count(self.outcome)
        self.pool.completions.complete(self)

    def on_stale(self) -> None:
        logger.warning("task %s: a newer attempt owns it; dropped here", self.task_id)
        self.over = True
        if self.handle is not None:
            self.handle.cancel()
        self.pool.mailbox.post(self._leave)

    def on_released(self) -> None:
        self.over = True
        self.pool.mailbox.post(lambda: None)

    def on_cancel(self, *, flagged: bool) -> None:
        if flagged:
            self.ending = self.ending or "revoked"
        if self.handle is not None:
            self.handle.cancel()

    # ------------------------------------------------------------ completion threads

    @property
    def plain(self) -> bool:
        """Is there a result of ordinary size to store, and nothing to send before that or because of it?"""
        request, outcome = self.delivery.request, self.outcome
        assert outcome is not None
        if outcome.result is None or outcome.revoked or self._timed_out(outcome) or request.ignore_result:
            return False
        if len(outcome.result.get("logprobs", ())) > FEW_LOGPROBS:
            return False
        _, _, embed = request._payload
        return not any((embed or {}).get(name) for name in ("callbacks", "chain", "chord"))

    @property
    def success(self) -> Success:
        """What is stored of a job that is plain."""
        assert self.outcome is not None
        assert self.outcome.result is not None
        return self.task_id, self.outcome.result, self.delivery.request._context

    @_or_give_up
    def complete(self) -> None:
        """The end is written: run Celery's trace, which stores the result and sends links and callbacks."""
        outcome = self.outcome
        assert outcome is not None
        limit, kind = self._deadline
        if outcome.revoked:
            self.pool.mailbox.post(self._announce)
        elif self._timed_out(outcome):
            self.pool.mailbox.post(lambda: self._time_out(limit or 0.0))
        else:
            if outcome.finish_reason == FinishReason.DEADLINE and kind == "soft":
                self.pool.mailbox.post(lambda: self.delivery.timeout_callback(True, limit or 0.0))
            self._trace()

    def _timed_out(self, outcome: Outcome) -> bool:
        """By Celery's hard limit, so that it fails and no result is stored."""
        return outcome.finish_reason == FinishReason.DEADLINE and self._deadline[1] == "hard"

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

    @_or_give_up
    def _replay(self) -> None:
        """Callbacks are sent before the result is stored, so a stored result means that they were."""
        request = self.delivery.request
        backend = request.task.backend
        stored = backend.get_task_meta(self.task_id, cache=False)
        if stored.get("status") not in states.READY_STATES:
            self.complete()
            return
        if request.chord:  # counting a header task twice is harmless, not counting it is not
            backend.on_chord_part_return(request._context, stored["status"], stored["result"])
        self.pool.mailbox.post(self._drop)

    def _store_started(self) -> None:
        request = self.delivery.request
        with self._storing:
            if self.outcome is None and self.ending is None and not request.ignore_result:
                meta = {"pid": os.getpid(), "hostname": request.hostname}
                store_started(request.task.backend, self.task_id, meta, request._context)

    # ------------------------------------------------------------ consumer's thread

    def rebind(self, delivery: Delivery) -> None:
        """The message came again, after a lost connection: the sequence goes on, for the new request object."""
        self.superseded.append(self.delivery)
        self.delivery = delivery
        if delivery.request.ending is not None:
            self.stop(delivery.request.ending)
        if self.accepted:
            delivery.accept_callback(os.getpid(), self.admitted_at or self.taken_at)

    def stop(self, ending: Ending) -> None:
        """Celery's revocation, or an `expires` that has passed."""
        if self.ending is None and not self.over:
            self.ending = ending
            if ending == "revoked":
                self.pool.completions.run(lambda: fleet.flag_cancel(self.task_id))
            if self.handle is not None:
                self.handle.cancel()

    def terminate(self, signum: object = None) -> None:
        """The worker ends, and Celery cancels what it has."""
        if not self.over:
            self.hand_back()

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
        request.revoked()  # while it waited in the engine
        if request.ending is not None:
            self.stop(request.ending)
        if self.ending is None:
            self.accepted = True
            self.delivery.accept_callback(os.getpid(), self.admitted_at or time.monotonic())
            if self.outcome is None:
                self.pool.completions.run(self._store_started)

    @_or_give_up
    def _settle(self, outcome: tuple[bool, Any, float]) -> None:
        self._forget()
        self.delivery.callback(outcome)

    @_or_give_up
    def _time_out(self, limit_s: float) -> None:
        self._forget()
        self.delivery.timeout_callback(False, limit_s)

    @_or_give_up
    def _announce(self) -> None:
        assert self.outcome is not None
        with self._storing:
            try:
                self.delivery.request.announce(str(self.outcome.stop_reason), running=self.accepted)
            finally:
                self._forget()

    @_or_give_up
    def _leave(self) -> None:
        """A newer attempt owned the task. It may be over by now, and its message here again: that goes back to the
        queue, if it is this worker's indeed."""
        self._forget()
        if self.superseded:
            self.delivery.requeue()
        else:
            self.delivery.acknowledge()

    def _drop(self) -> None:
        """Acknowledge without a word: somebody else has said, or will say, how the task ended."""
        self._forget()
        self.delivery.acknowledge()

    def _requeue(self) -> None:
        """Not when the worker ends: then all that is not acknowledged goes back."""
        self._forget()
        self.pool.hub.call_later(GIVE_UP_S, self.delivery.requeue)

    def _forget(self) -> None:
        self.over = True
        self.pool.forget(self)
        for delivery in self.superseded:
            delivery.acknowledge()
