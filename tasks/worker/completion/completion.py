"""Completes one task that has ended, step by step: it talks to Celery and to the task's result backend.

replay ──not completed──► claim ──► trace ──success──────────────────► mark ──► Completed
  └► COMPLETED              │ │       └──failure──► examine ─────────────┤
                            │ │                        └──refused──► trace again
                            │ └──► announce, time_out ──► ANSWERED
                            └► CLAIMED
any step ──refused──► NotStored, and later the same step again (see `once`: its effects happen once)
any step ──another error──► fail ──► mark        (the error would come again with each delivery)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Union

from billiard.einfo import ExceptionInfo
from celery import states

from petiole.contract.results.vectors import FIELDS
from petiole.tasks.app.backend import refuses
from petiole.tasks.traces import carried
from petiole.tasks.worker.completion import claims
from petiole.tasks.worker.completion.reports import Completed, NeverStored, NotStored, OtherDelivery, Report
from petiole.tasks.worker.delivery.delivery import Messages
from petiole.tasks.worker.idempotency import IdempotentCompletion, ServerUnavailable
from petiole.tasks.worker.output.outcomes import Outcome, Success, at_hand

logger = logging.getLogger(__name__)

FEW_LOGPROBS = 1_000
"""Maximum number of positions with log-probabilities in a result that is stored in a batch. Larger results would
block Redis."""

Step = Callable[["Completion"], Union["Step", Report]]
"""A method of `Completion`. It returns the next step, or the outcome of the completion. The method is unbound,
because a bound one would keep the completion, and its result, until a garbage collection."""


class Completion:
    """The completion of one task. One thread at a time takes its steps. It calls `tell` with the outcome, or
    `hand_on` if the next step is for another thread.

    `replay`: another delivery may have completed the task. `hard_limit_s`: the hard limit, if it ended the
    generation.
    """

    def __init__(
        self,
        task_id: str,
        messages: Messages,
        outcome: Outcome,
        *,
        replay: bool,
        hard_limit_s: float | None,
        tell: Callable[[Report], object],
        hand_on: Callable[[], object],
    ) -> None:
        self.task_id, self.tell = task_id, tell
        self._messages, self._outcome, self._hard_limit_s = messages, outcome, hard_limit_s
        self._hand_on = hand_on
        self._next: Step = Completion._replay if replay else Completion._claim
        self._failing = False
        self._once = IdempotentCompletion(f"{task_id} {messages.current.retries}")

    @property
    def request(self) -> Any:
        return self._messages.current.request

    @property
    def for_consumer(self) -> bool:
        """Whether the next step changes Celery's request: only the consumer's thread may take it."""
        return self._next in (Completion._announce, Completion._time_out)

    @property
    def plain(self) -> bool:
        """Whether the result may be stored in a batch: a small success without callbacks, chain or chord."""
        result = self._outcome.result
        if result is None or self._reporting != Completion._trace or self.request.ignore_result:
            return False
        return len(result.get("logprobs", ())) <= FEW_LOGPROBS and not claims.linked_on_success(self.request)

    @property
    def storable(self) -> bool:
        """Whether the next step is to store `success`."""
        return self._next == Completion._claim and self.plain

    @property
    def success(self) -> Success:
        assert self._outcome.result is not None
        return Success(self.task_id, self._outcome.result, self.request._context)

    def take(self) -> None:
        """Take the next step and those that follow on the same thread."""
        if (report := self._taken()) is None:
            self._hand_on()
            return
        self.tell(report)
        if report is OtherDelivery.ANSWERED:  # if the message comes again, nothing is sent twice
            self._note(partial(claims.mark, self.request))

    def _taken(self) -> Report | None:
        on_consumer = self.for_consumer
        while self.for_consumer == on_consumer:
            try:
                with self._once.trying(_name(self._next)):
                    after = self._next(self)
            except ServerUnavailable as refusal:
                return NotStored(refusal.reason)
            except Exception as error:
                if refuses(error):
                    return NotStored(error)
                if self._failing:
                    return NeverStored(error)
                logger.exception("task %s cannot be completed", self.task_id)
                after, self._failing = partial(Completion._fail, failure=ExceptionInfo()), True
            if isinstance(after, Report):
                return after
            self._next = after
        return None

    # ------------------------------------------------------------ steps

    def _replay(self) -> Step | Report:
        """Complete the task unless another delivery has done so."""
        request = self.request
        if not claims.completed(request):
            return Completion._claim
        if request.chord:  # it may be counted twice, but must be counted
            stored = request.task.backend.get_task_meta(self.task_id, cache=False)
            status, result = stored["status"], stored["result"]
            if status in states.READY_STATES:
                request.task.backend.on_chord_part_return(request._context, status, result)
        return OtherDelivery.COMPLETED

    def _claim(self) -> Step | Report:
        """Claim the completion, then report the outcome to Celery."""
        claimed = self.plain or claims.claim(self.request, self._once.token)
        return self._reporting if claimed else OtherDelivery.CLAIMED

    @property
    def _reporting(self) -> Step:
        if self._outcome.revoked:
            return Completion._announce
        return Completion._trace if self._hard_limit_s is None else Completion._time_out

    def _announce(self) -> Report:
        """Have Celery store REVOKED."""
        running = self._messages.accepted_at is not None
        self.request.announce(str(self._outcome.stop_reason), running=running)
        return OtherDelivery.ANSWERED

    def _time_out(self) -> Report:
        """Have Celery store that the task exceeded its hard limit."""
        assert self._hard_limit_s is not None
        self._messages.current.timeout_callback(False, self._hard_limit_s)
        return OtherDelivery.ANSWERED

    def _trace(self) -> Step:
        """Run Celery's trace, which stores the outcome and sends what is linked to it."""
        delivery = self._messages.current
        try:
            with at_hand(self.task_id, self._outcome), carried.following(carried.of(delivery.message)):
                failed, value, _ = delivery.target(*delivery.args)
        except ServerUnavailable:
            raise
        except BaseException:
            failed, value = True, ExceptionInfo()
        return partial(Completion._examine, failure=value) if failed else partial(Completion._mark, value=value)

    def _examine(self, failure: ExceptionInfo) -> Step | Report:
        """The trace has reported a failure. There are three cases: Celery has stored the failure (of a callback
        that could not be sent, say); the backend has refused the outcome; or no backend could ever store the
        outcome."""
        request, error = self.request, _error(failure)
        if not claims.is_stored(request):
            if refuses(error):
                self._next = Completion._trace
                return NotStored(error)
            logger.error("task %s: its outcome cannot be stored: %r", self.task_id, error)
            claims.fail(request, error)
        return partial(Completion._mark, value=failure)

    def _fail(self, failure: ExceptionInfo) -> Step:
        """Store that the task was revoked, as its stream says, or else a failure."""
        request = self.request
        if not claims.is_stored(request):
            if self._outcome.revoked:
                reason = str(self._outcome.stop_reason)
                request.task.backend.mark_as_revoked(request.id, reason, request=request._context)
            else:
                claims.fail(request, _error(failure))
        return partial(Completion._mark, value=failure)

    def _mark(self, value: object) -> Report:
        """Record that the task is completed."""
        if not self.plain:
            claims.mark(self.request)
        result = self._outcome.result
        if (
            result is not None
            and not result.keys().isdisjoint(FIELDS.values())
            and not isinstance(value, ExceptionInfo)
        ):
            self._note(partial(claims.retire, self.request, result["attempt"]))
        return Completed(value)

    def _note(self, note: Callable[[], object]) -> None:
        """Write what the task may be without, unless Redis refuses it."""
        try:
            note()
        except Exception as error:
            if not refuses(error):
                raise
            logger.debug("task %s is completed, which is not recorded: %s", self.task_id, error)


def _name(step: Step) -> str:
    return str(getattr(step, "func", step).__name__)


def _error(failure: ExceptionInfo) -> BaseException:
    return getattr(failure.exception, "exc", failure.exception)  # type: ignore[no-any-return]
