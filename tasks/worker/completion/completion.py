"""Completes one task that has ended: the steps that talk to Celery and to its result backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import states

from petiole.tasks.app.backend import refuses, trying_once
from petiole.tasks.worker.completion import claims, steps
from petiole.tasks.worker.completion.steps import Report, Step
from petiole.tasks.worker.delivery.messages import Messages
from petiole.tasks.worker.output.outcomes import Outcome, Success, at_hand

logger = logging.getLogger(__name__)

FEW_LOGPROBS = 1_000
"""Most positions with log probabilities of a result that is stored in a batch: larger ones would block Redis."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`how`: how the outcome is reported to Celery. `tell` is called with what each `take` came to."""

    task_id: str
    messages: Messages
    outcome: Outcome
    how: steps.How
    tell: Callable[[Report], None]

    @property
    def request(self) -> Any:
        return self.messages.current.request

    @property
    def plain(self) -> bool:
        """Whether the result may be stored in a batch: a small success without callbacks, chain or chord."""
        result = self.outcome.result
        if result is None or not isinstance(self.how, steps.Trace) or self.request.ignore_result:
            return False
        return len(result.get("logprobs", ())) <= FEW_LOGPROBS and not claims.linked_on_success(self.request)

    @property
    def success(self) -> Success:
        """What to store for a task that is `plain`."""
        assert self.outcome.result is not None
        return Success(self.task_id, self.outcome.result, self.request._context)

    def take(self, step: Step) -> None:
        """Take `step` and those that follow on the same thread."""
        try:
            report = self._take_all(step)
        except Exception as error:
            report = steps.Hopeless(error)
        self.tell(report)
        if isinstance(report, steps.Answered):
            claims.mark(self.request)

    def _take_all(self, step: Step) -> Report:
        """A step that the backend refuses is taken again later. Another error would come again with each delivery:
        it fails the task. Raises what prevents even that."""
        thread, failing = isinstance(step, steps.CONSUMERS), isinstance(step, steps.Fail)
        while True:
            after: Step | Report
            try:
                with trying_once(self.request.task.backend):
                    after = self._take(step)
            except Exception as error:
                if refuses(error):
                    return steps.Refused(step, error)
                if failing:
                    raise
                logger.exception("task %s cannot be completed", self.task_id)
                after, failing = steps.Fail(ExceptionInfo()), True
            if isinstance(after, Report):
                return after
            if isinstance(after, steps.CONSUMERS) != thread:
                return steps.Next(after)
            step = after

    def _take(self, step: Step) -> Step | Report:
        request, delivery = self.request, self.messages.current
        match step:
            case steps.Replay():
                return self._replay()
            case steps.Claim():
                return self.how if self.plain or claims.claim(request) else steps.Elsewhere()
            case steps.Announce():
                running = self.messages.accepted_at is not None
                request.announce(str(self.outcome.stop_reason), running=running)
                return steps.Answered()
            case steps.TimeOut(limit_s):
                delivery.timeout_callback(False, limit_s)
                return steps.Answered()
            case steps.Trace():
                return self._trace()
            case steps.Examine(failure):
                return self._examine(failure)
            case steps.Store(failure):
                if claims.is_stored(request):
                    return steps.Mark(True, failure)
                request.task.backend.mark_as_done(request.id, self.outcome.result, request._context)
                return steps.Mark(False, self.outcome.result)
            case steps.Fail(failure):
                if not claims.is_stored(request):
                    self._store_end(_error(failure))
                return steps.Mark(True, failure)
            case steps.Mark(failed, value):
                if not self.plain:
                    claims.mark(request)
                return steps.Completed(failed, value)

    def _store_end(self, error: BaseException) -> None:
        """Store that the task was revoked, as its stream says, or else a failure because of `error`."""
        request = self.request
        if self.outcome.revoked:
            reason = str(self.outcome.stop_reason)
            request.task.backend.mark_as_revoked(request.id, reason, request=request._context)
        else:
            claims.fail(request, error)

    def _replay(self) -> Step | Report:
        request = self.request
        if not claims.completed(request):
            return steps.Claim()
        stored = request.task.backend.get_task_meta(self.task_id, cache=False)
        if (
            request.chord
            and stored["status"] in states.READY_STATES  # may be counted twice, but must be counted
            and not claims.chord_returned(request, stored["status"], stored["result"])
        ):
            return steps.Wait(steps.Replay())
        return steps.Left()

    def _trace(self) -> Step:
        delivery = self.messages.current
        try:
            with at_hand(self.task_id, self.outcome):
                failed, value, _ = delivery.target(*delivery.args)
        except BaseException:
            failed, value = True, ExceptionInfo()
        return steps.Examine(value) if failed else steps.Mark(False, value)

    def _examine(self, failure: ExceptionInfo) -> Step | Report:
        """The trace has reported a failure. Either Celery has stored it, such as of a callback that could not be
        sent, or the backend has refused the outcome, or nobody could store it."""
        request, error = self.request, _error(failure)
        if not claims.is_stored(request):
            if refuses(error):  # a failure was not reported to anybody yet, but a success may have been
                return steps.Refused(steps.Trace() if self.outcome.result is None else steps.Store(failure), error)
            logger.error("task %s: its outcome cannot be stored: %r", self.task_id, error)
            claims.fail(request, error)
        return steps.Mark(True, failure)


def _error(failure: ExceptionInfo) -> BaseException:
    return getattr(failure.exception, "exc", failure.exception)  # type: ignore[no-any-return]
