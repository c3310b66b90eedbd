"""One generation task in this worker, from its delivery to its acknowledgement.

    delivered ──begin──► submitted ──► admitted ──► ended ──finish──► finished ──trace──► acknowledged
                            │              │           │                 └ links and callbacks are sent only here
                            │              │           └ stale: a newer attempt owns the task: see `standby`
                            └──────────────┴ handed back: another worker resumes; the message is not acknowledged

    ended, but refused by the result backend: parked with the reason, and tried again by a timer; at shutdown the
    message goes back, and the next delivery completes the task

    in any state, after an unexpected exception: given up; the next delivery resumes the task, or completes it if
    it has ended

Threads: the intake thread begins and submits, the engine's text thread reports output, the publisher thread
reports whether this attempt wrote the end, a completion thread runs Celery's trace, and only the consumer's
thread changes Celery's request, in the order in which changes were posted. The state stored for a task, REVOKED, a
failure or a result, always agrees with its last delta, whichever delivery stores it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import states

from petiole.gpu_worker.errors import EngineError, HandedBack
from petiole.gpu_worker.handle import Handle
from petiole.gpu_worker.request import Delta, FinishReason, Request
from petiole.tasks.app.backend import refuses, trying_once
from petiole.tasks.errors import GenerationFailed
from petiole.tasks.fleet import control
from petiole.tasks.keys import stream_keys
from petiole.tasks.worker.completion import claims
from petiole.tasks.worker.completion.standby import LOOK_S, Standby
from petiole.tasks.worker.completion.started import store_started
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.generation.attempts import Begun
from petiole.tasks.worker.generation.limits import TimeLimits
from petiole.tasks.worker.generation.workplace import Workplace
from petiole.tasks.worker.output.outcomes import (
    Ending,
    Outcome,
    Success,
    at_hand,
    ended,
    failed,
    recorded,
    succeeded,
    within,
)
from petiole.tasks.worker.output.publisher import Outbox

logger = logging.getLogger(__name__)

FEW_LOGPROBS = 1_000
"""Most positions with log probabilities of a result that is stored in a batch: larger ones would block Redis."""

REQUEUE_AFTER_S = 1.0
"""Delay until the message of a given-up task is requeued, because the same error may happen again."""


def _or_give_up(step: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a step of a job: an exception gives the job up, so that its message is not held for ever."""

    @wraps(step)
    def tried(job: Job, *args: Any) -> None:
        try:
            step(job, *args)
        except Exception:
            job.give_up()

    return tried


class Job:
    """A generation task taken by this worker. Celery keeps it as the handle to terminate the task."""

    def __init__(self, pool: Workplace, delivery: Delivery) -> None:
        self.pool = pool
        self.delivery = delivery
        self.superseded: list[Delivery] = []
        self.task_id = delivery.task_id
        self.taken_at = time.monotonic()
        self.request_deadline_s: float | None = None
        self.admitted_at: float | None = None
        self.begun: Begun | None = None
        self.handle: Handle | None = None
        self.outbox: Outbox | None = None
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self.accepted = self.handing_back = self.over = False
        self.parked = ""
        self._parked_at = 0.0
        self._deciding = threading.Lock()
        self._storing = threading.RLock()

    @property
    def limits(self) -> TimeLimits:
        delivery = self.delivery
        return TimeLimits(delivery.soft_timeout_s, self.request_deadline_s, delivery.timeout_s)

    def withdraw(self, ending: Ending | None) -> bool:
        """Decide, on any thread, that the task ends as REVOKED. The first decision stays, whatever other threads
        decide meanwhile. Returns whether this is the first."""
        with self._deciding:
            if self.ending is not None or ending is None:
                return False
            self.ending = ending
            return True

    def give_up(self) -> None:
        """Drop the task and requeue its message, on any thread. Counts as a death unless the task has ended."""
        logger.error("task %s is given up here; its message is requeued", self.task_id, exc_info=sys.exception())
        self.over = True
        if self.outbox is not None:
            self.outbox.drop()
        if self.handle is not None:
            self.handle.cancel()
        self.pool.mailbox.post(self._requeue_later)

    # ------------------------------------------------------------ intake

    def begin(self, begun: Begun, *, needs_reader: bool, marked: bool) -> None:
        """`marked`: `begin.lua` has set `running` for this task."""
        self.begun = begun
        self.withdraw("revoked" if begun.cancel else self.delivery.ending)
        publisher = self.pool.publisher
        self.outbox = Outbox(
            publisher, self.task_id, begun.attempt, begun.written, self, needs_reader=needs_reader, marked=marked
        )

    def submit(self, request: Request) -> None:
        """Submit the request to the engine, and apply a cancel or handback that came before."""
        self.handle = self.pool.engine.submit(
            request, on_admitted=self._on_admitted, on_delta=self._on_delta, on_done=self._on_done
        )
        if self.ending is not None:
            self.handle.cancel()
        if self.handing_back:
            self.handle.hand_back()

    def end(self, outcome: Outcome) -> None:
        """Write the end of the stream. The outcome is final once the publisher has written it."""
        self.outcome = outcome
        assert self.outbox is not None
        self.outbox.finish(outcome)

    def replay(self, begun: Begun) -> None:
        """An earlier delivery finished the task: store the recorded outcome, if it is not stored yet."""
        assert begun.record is not None
        self.outcome = recorded(begun.record, begun.written)
        self.pool.completions.run(self._replay)

    # ------------------------------------------------------------ engine's text thread

    def _on_admitted(self, handle: Handle) -> None:
        self.admitted_at = time.monotonic()
        self.withdraw(self.delivery.ending)
        if self.ending is not None:
            handle.cancel()
        if self.outbox is not None:
            self.outbox.admit(handle.adapter_key or "")
        self.pool.mailbox.post(self._accept)

    def _on_delta(self, handle: Handle, delta: Delta) -> None:
        assert self.outbox is not None
        self.outbox.push(delta)

    @_or_give_up
    def _on_done(self, handle: Handle) -> None:
        if self.outcome is not None:  # it has failed, because its stream is damaged
            return
        assert self.outbox is not None
        assert self.begun is not None
        error = handle.error
        if isinstance(error, HandedBack) or (isinstance(error, EngineError) and not self.pool.engine.healthy):
            if self.pool.engine.healthy:
                self.outbox.release()
            else:  # this task may have caused the failure: `running` stays set, so that a death is counted
                self.on_released()
        elif error is not None:
            self.end(failed(error))
        else:
            outcome = succeeded(handle.result(), self.begun.attempt, self.begun.written)
            if self.ending is not None and outcome.finish_reason == FinishReason.CANCELLED:
                outcome = ended(self.ending)
            elif not self.limits.failed(outcome):
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
        self.pool.mailbox.post(self._stand_by)

    def on_damaged(self) -> None:
        """The task's keys in Redis are damaged: it fails, and its stream has no last delta."""
        keys = stream_keys(self.task_id)
        expected = f"{keys.log} must be a list, and {keys.state} a hash with whole numbers as attempt and deaths"
        logger.error("task %s: its stream is damaged: %s", self.task_id, expected)
        self.fail(GenerationFailed(f"its stream in Redis is damaged: {expected}"))

    def fail(self, error: Exception) -> None:
        """End without a last delta in the stream: no attempt was begun, or it cannot be written."""
        self.outcome = failed(error)
        if self.handle is not None:
            self.handle.cancel()
        self.pool.tally.count(self.outcome)
        self.pool.completions.run(self._replay)

    def on_released(self) -> None:
        self.over = True
        self.pool.mailbox.post(lambda: None)

    def on_cancel(self, *, flagged: bool) -> None:
        if flagged:
            self.withdraw("revoked")
        if self.handle is not None:
            self.handle.cancel()

    # ------------------------------------------------------------ completion threads

    @property
    def plain(self) -> bool:
        """Whether the result may be stored in a batch: a small success without callbacks, chain or chord."""
        request, outcome = self.delivery.request, self.outcome
        assert outcome is not None
        if outcome.result is None or outcome.revoked or self.limits.failed(outcome) or request.ignore_result:
            return False
        small = len(outcome.result.get("logprobs", ())) <= FEW_LOGPROBS
        return small and not claims.linked_on_success(request)

    @property
    def success(self) -> Success:
        """What to store for a job that is `plain`."""
        assert self.outcome is not None
        assert self.outcome.result is not None
        return self.task_id, self.outcome.result, self.delivery.request._context

    def park(self, reason: BaseException, again: Callable[[], object]) -> None:
        """The result backend refuses the outcome: try `again` later. In the end, give the message back."""
        if not self.parked:
            self._parked_at = time.monotonic()
            logger.error("task %s: its outcome cannot be stored yet: %s", self.task_id, reason)
        self.parked = str(reason) or repr(reason)
        if self.handing_back:
            self.over = True
        if time.monotonic() - self._parked_at > claims.PARKED_FOR_S:
            try:
                raise claims.OutcomeNotStoredError(self.task_id) from reason
            except claims.OutcomeNotStoredError:
                self.give_up()
        else:
            self.pool.completions.run_later(again)

    def _try(self, step: Callable[[], None]) -> None:
        """Take a step of the completion; park it if the backend refuses what it stores. Another error would come
        again with each delivery: it fails the task."""
        try:
            with trying_once(self.delivery.request.task.backend):
                step()
        except Exception as error:
            if refuses(error):
                self.park(error, lambda: self._try(step))
            else:
                logger.exception("task %s cannot be completed", self.task_id)
                self._fail_completion(ExceptionInfo())

    def _fail_completion(self, failure: ExceptionInfo) -> None:
        request, error = self.delivery.request, getattr(failure.exception, "exc", failure.exception)
        try:
            with trying_once(request.task.backend):
                if not claims.is_stored(request):
                    claims.fail(request, error)
                self._finish(True, failure)
        except Exception as again:
            if refuses(again):
                self.park(again, lambda: self._fail_completion(failure))
            else:
                self.give_up()

    def complete(self) -> None:
        """After the end is in the log: report it to Celery, usually by its trace, which also sends callbacks."""
        self._try(self._complete)

    def _complete(self) -> None:
        outcome = self.outcome
        assert outcome is not None
        if not self.plain and not claims.claim(self.delivery.request):
            self.over = True
            self.pool.mailbox.post(self._stand_by)
            return
        limit = self.limits.exceeded(outcome)
        if outcome.revoked:
            self.pool.mailbox.post(self._announce)
        elif limit is not None and limit.kind == "hard":
            self.pool.mailbox.post(lambda: self._time_out(limit.after_s))
        else:
            if limit is not None and limit.kind == "soft":
                self.pool.mailbox.post(lambda: self.delivery.timeout_callback(True, limit.after_s))
            self._trace()

    def _trace(self) -> None:
        delivery, outcome = self.delivery, self.outcome
        assert outcome is not None
        with self._storing:
            try:
                with at_hand(self.task_id, outcome):
                    failure, value, _ = delivery.target(*delivery.args)
            except BaseException:
                failure, value = True, ExceptionInfo()
        if failure:
            self._try(lambda: self._examine(value))
        else:
            self._try(lambda: self._finish(False, value))

    def _examine(self, failure: ExceptionInfo) -> None:
        """The trace has reported a failure. Either Celery has stored it, such as of a callback that could not be
        sent, or the backend has refused the outcome, or nobody could store it."""
        assert self.outcome is not None
        request, error = self.delivery.request, getattr(failure.exception, "exc", failure.exception)
        if not claims.is_stored(request):
            if refuses(error):  # a failure was not reported to anybody yet, but a success may have been
                again = self._trace if self.outcome.result is None else lambda: self._store(failure)
                self.park(error, lambda: self._try(again))
                return
            logger.error("task %s: its outcome cannot be stored: %r", self.task_id, error)
            claims.fail(request, error)
        self._try(lambda: self._finish(True, failure))

    def _store(self, failure: ExceptionInfo) -> None:
        """Store a success that the backend has refused before. What is linked to it was sent."""
        assert self.outcome is not None
        request, result = self.delivery.request, self.outcome.result
        if claims.is_stored(request):
            self._try(lambda: self._finish(True, failure))
            return
        request.task.backend.mark_as_done(request.id, result, request._context)
        self._try(lambda: self._finish(False, result))

    def _finish(self, failed: bool, value: object) -> None:
        if not self.plain:
            claims.mark(self.delivery.request)
        if self.parked:
            logger.warning("task %s: its outcome is stored", self.task_id)
        runtime_s = time.monotonic() - (self.admitted_at or self.taken_at)
        self.pool.mailbox.post(lambda: self._settle((failed, value, runtime_s)))

    def _replay(self) -> None:
        self._try(self._complete_unless_completed)

    def _complete_unless_completed(self) -> None:
        """Complete the task unless an earlier delivery has done so."""
        request = self.delivery.request
        if not claims.completed(request):
            self._complete()
            return
        backend = request.task.backend
        stored = backend.get_task_meta(self.task_id, cache=False)
        if (
            request.chord
            and stored["status"] in states.READY_STATES  # may be counted twice, but must be counted
            and not claims.chord_returned(request, stored["status"], stored["result"])
        ):
            self.pool.mailbox.post(self._replay_later)
        else:
            self.pool.mailbox.post(self.leave)

    def _replay_later(self) -> None:
        self.pool.hub.call_later(LOOK_S, lambda: self.pool.completions.run(self._replay))

    def _store_started(self) -> None:
        request = self.delivery.request
        with self._storing:
            if self.outcome is None and self.ending is None and not request.ignore_result:
                meta = {"pid": os.getpid(), "hostname": request.hostname}
                store_started(request.task.backend, self.task_id, meta, request._context)

    # ------------------------------------------------------------ consumer's thread

    def rebind(self, delivery: Delivery) -> None:
        """The message came again after a lost connection: keep generating, for the new request object.

        A request may also come after its message was lost: Celery holds it until its `eta`. If the message has
        come again before that, its newer request is kept: if this job is requeued, that is what goes back.
        """
        if not delivery.held:
            self.superseded.append(delivery)
            return
        self.superseded.append(self.delivery)
        self.delivery = delivery
        if delivery.request.ending is not None:
            self.stop(delivery.request.ending)
        if self.accepted:
            delivery.begun()
            delivery.accept_callback(os.getpid(), self.admitted_at or self.taken_at)

    def stop(self, ending: Ending) -> None:
        """Cancel the generation, because the task was revoked or has expired."""
        if self.withdraw(ending):
            if ending == "revoked":
                self.pool.completions.run(lambda: control.flag_cancel(self.task_id))
            if self.handle is not None:
                self.handle.cancel()

    def terminate(self, signum: object = None) -> None:
        """Called by Celery when the worker shuts down."""
        if not self.over:
            self.hand_back()

    def hand_back(self) -> None:
        """Let another worker resume the task. `over` is set once all output of this attempt is in the log."""
        self.handing_back = True
        if self.parked:
            self.over = True
        elif self.handle is not None:
            self.handle.hand_back()
        elif self.outbox is None:
            self.over = True

    def _accept(self) -> None:
        self.delivery.begun()
        if self.accepted or self.over:
            return
        request = self.delivery.request
        request.revoked()  # or expired, while it waited in the engine
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
        try:
            with trying_once(self.delivery.request.task.backend):
                self.delivery.timeout_callback(False, limit_s)
        except Exception as error:
            self._post_again(error, lambda: self._time_out(limit_s))
            return
        self._forget()
        claims.mark(self.delivery.request)

    @_or_give_up
    def _announce(self) -> None:
        assert self.outcome is not None
        try:
            with self._storing, trying_once(self.delivery.request.task.backend):
                self.delivery.request.announce(str(self.outcome.stop_reason), running=self.accepted)
        except Exception as error:
            self._post_again(error, self._announce)
            return
        self._forget()

    def _post_again(self, error: Exception, step: Callable[[], None]) -> None:
        """Park a step of the consumer's thread that the backend refuses; another error, such as of an error
        callback that cannot be sent, fails the task."""
        if refuses(error):
            self.park(error, lambda: self.pool.mailbox.post(step))
            return
        logger.exception("task %s cannot be completed", self.task_id)
        failure = ExceptionInfo()
        self.pool.completions.run(lambda: self._fail_completion(failure))

    @_or_give_up
    def _stand_by(self) -> None:
        Standby(self).watch()

    @_or_give_up
    def leave(self) -> None:
        """Acknowledge without a result or event: another delivery reports how the task ended."""
        self._forget()
        self.delivery.acknowledge()

    @_or_give_up
    def requeue(self) -> None:
        """Requeue the message: another delivery resumes or completes the task."""
        self._forget()
        self.delivery.requeue()

    def _requeue_later(self) -> None:
        """Without effect at shutdown, when all unacknowledged messages go back."""
        self._forget()
        self.pool.hub.call_later(REQUEUE_AFTER_S, self.delivery.requeue)

    def _forget(self) -> None:
        self.over = True
        self.pool.forget(self)
        for delivery in self.superseded:
            delivery.acknowledge()
