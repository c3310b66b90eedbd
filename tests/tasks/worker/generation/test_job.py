"""The job's state machine: what each event leads to, in each state."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gpu_worker.request import Request
from petiole.tasks.worker.completion.reports import Completed, NeverStored, NotStored, OtherDelivery
from petiole.tasks.worker.delivery.delivery import TimeLimits
from petiole.tasks.worker.generation.effects import (
    Accept,
    Action,
    Complete,
    Count,
    Effects,
    GiveUp,
    Park,
    Settle,
    Submit,
    WriteEnd,
)
from petiole.tasks.worker.generation.job import PARKED_FOR_S, Job, JobError, State
from petiole.tasks.worker.output.outcomes import Outcome, ended
from tests.support.jobs import LARGE, SUCCESS

REQUEST = Request(prompt=[1])
NO_LIMITS = TimeLimits(None, None, None)
AWAY = ConnectionError("away")


def job_in(state: State) -> Job:
    """A job that has come to this state."""
    job = Job("task", taken_at=10.0)
    events: dict[State, list[Any]] = {
        State.QUEUED: [],
        State.GENERATING: [lambda: job.begun(REQUEST, NO_LIMITS, None)],
        State.RELEASING: [job.handed_back],
        State.ENDED: [lambda: job.generated(SUCCESS, LARGE)],
        State.FINISHED: [job.written],
        State.COMPLETING: [job.written],
        State.PARKED: [lambda: job.reported(NotStored(AWAY), 20.0)],
        State.STANDING_BY: [job.stale],
        State.SETTLED: [lambda: job.reported(Completed("value"), 20.0)],
        State.HANDED_BACK: [job.released],
        State.GIVEN_UP: [lambda: job.give_up(AWAY)],
    }
    way = {
        State.QUEUED: (),
        State.RELEASING: (State.GENERATING,),
        State.HANDED_BACK: (State.GENERATING, State.RELEASING),
        State.ENDED: (State.GENERATING,),
        State.FINISHED: (State.GENERATING, State.ENDED),
        State.COMPLETING: (State.GENERATING, State.ENDED),
        State.PARKED: (State.GENERATING, State.ENDED, State.COMPLETING),
        State.SETTLED: (State.GENERATING, State.ENDED, State.COMPLETING),
        State.STANDING_BY: (State.GENERATING,),
    }.get(state, ())
    for passed in (*way, state):
        if passed is State.ENDED and state is State.FINISHED:
            job.admitted(11.0, None)
            job.accepted()
        for event in events[passed]:
            event()
    assert job.state is state
    return job


def test_a_generation_goes_all_the_way() -> None:
    job = Job("task", taken_at=10.0)
    assert job.begun(REQUEST, NO_LIMITS, None) == [Submit(REQUEST)]
    assert job.admitted(12.0, None) == [Accept(12.0)]
    assert job.accepted() == [Action.STORE_STARTED]
    assert job.started_stored() == []
    assert job.generated(SUCCESS, LARGE) == [WriteEnd(SUCCESS)]
    assert job.written() == [Count(SUCCESS), Complete(replay=False)]
    assert job.reported(Completed("value"), 15.0) == [Settle(False, "value", 3.0, None)]
    assert job.over


STOPPED: dict[State, Effects] = {state: [Action.FLAG] for state in State} | {
    State.GENERATING: [Action.FLAG, Action.CANCEL]
}


@pytest.mark.parametrize("state", State)
def test_a_stop_in_any_state_sets_the_flag_and_cancels_what_generates(state: State) -> None:
    job = job_in(state)
    assert job.stop("revoked") == STOPPED[state]
    assert job.state is state
    assert job.stop("expired") == [], "the first one stays"
    assert job.ending == "revoked"


def test_who_expires_needs_no_flag() -> None:
    assert job_in(State.GENERATING).stop("expired") == [Action.CANCEL]


def test_a_generation_that_ends_after_a_stop_is_revoked_however_it_ended() -> None:
    job = job_in(State.GENERATING)
    job.stop("revoked")
    assert job.generated(SUCCESS, LARGE) == [WriteEnd(ended("revoked"))]


def test_a_stop_after_the_end_changes_nothing() -> None:
    job = job_in(State.ENDED)
    job.stop("revoked")
    assert job.written() == [Count(SUCCESS), Complete(replay=False)]


@pytest.mark.parametrize("flagged", [True, False])
def test_a_flag_revokes_and_the_lack_of_readers_only_cancels(flagged: bool) -> None:
    job = job_in(State.GENERATING)
    assert job.cancel_asked(flagged=flagged) == [Action.CANCEL]
    cancelled = Outcome({"text": "", "token_ids": []}, finish_reason="cancelled")
    assert job.generated(cancelled, LARGE) == [WriteEnd(ended("revoked") if flagged else cancelled)]


def test_a_task_that_was_stopped_before_its_attempt_is_not_generated() -> None:
    job = job_in(State.QUEUED)
    job.stop("expired")
    assert job.begun(REQUEST, NO_LIMITS, None) == [WriteEnd(ended("expired"))]


def test_a_task_that_expired_while_it_waited_in_the_engine_is_not_accepted() -> None:
    job = job_in(State.GENERATING)
    assert job.admitted(12.0, "expired") == [Action.CANCEL]
    assert job.accepted() == []


HANDED_BACK: dict[State, tuple[Effects, State]] = {
    **{state: ([], state) for state in State},
    State.QUEUED: ([], State.HANDED_BACK),
    State.GENERATING: ([Action.HAND_BACK], State.GENERATING),
    State.PARKED: ([], State.HANDED_BACK),
}


@pytest.mark.parametrize("state", State)
def test_a_shutdown_in_any_state(state: State) -> None:
    job = job_in(state)
    assert (job.hand_back(), job.state) == HANDED_BACK[state]


def test_what_the_engine_hands_back_is_released_before_it_is_over() -> None:
    job = job_in(State.GENERATING)
    assert (job.handed_back(), job.over) == ([Action.RELEASE], False)
    assert (job.released(), job.over) == ([], True)


def test_an_attempt_that_begins_after_the_handback_is_released() -> None:
    job = job_in(State.QUEUED)
    job.hand_back()
    assert job.begun(REQUEST, NO_LIMITS, None) == [Action.RELEASE]
    assert not job.over
    job.released()
    assert job.over


def test_a_task_whose_engine_failed_is_not_released_so_that_a_death_is_counted() -> None:
    job = job_in(State.GENERATING)
    assert (job.engine_lost(), job.state) == ([], State.HANDED_BACK)


@pytest.mark.parametrize("state", [State.GENERATING, State.RELEASING, State.ENDED])
def test_who_has_lost_the_task_to_a_newer_attempt_completes_nothing(state: State) -> None:
    job = job_in(state)
    cancel: Effects = [Action.CANCEL] if state is State.GENERATING else []
    assert job.stale() == [*cancel, Action.STAND_BY]
    assert job.written() == job.generated(SUCCESS, LARGE) == job.released() == []
    assert job.over


@pytest.mark.parametrize(
    ("report", "effects"),
    [
        (OtherDelivery.COMPLETED, [Action.LEAVE]),
        (OtherDelivery.SILENT, [Action.REQUEUE]),
        (OtherDelivery.ANSWERED, []),
    ],
)
def test_who_stands_by_answers_once(report: Any, effects: Effects) -> None:
    job = job_in(State.STANDING_BY)
    assert job.reported(report, 20.0) == effects
    assert job.reported(report, 20.0) == []


def test_who_finds_the_completion_claimed_stands_by() -> None:
    job = job_in(State.COMPLETING)
    assert (job.reported(OtherDelivery.CLAIMED, 20.0), job.state) == ([Action.STAND_BY], State.STANDING_BY)


@pytest.mark.parametrize("state", [State.QUEUED, State.GENERATING, State.RELEASING, State.ENDED])
def test_a_task_whose_stream_is_damaged_fails_without_a_last_delta(state: State) -> None:
    job = job_in(state)
    *_, count, take = job.fail(ValueError("damaged"))
    assert (count, take) == (Count(job.outcome), Complete(replay=True))  # type: ignore[arg-type]
    assert job.outcome is not None
    assert job.outcome.error is not None
    assert job.generated(SUCCESS, LARGE) == job.written() == [] if state is not State.QUEUED else True


def test_a_refused_outcome_is_tried_again_and_says_so_once() -> None:
    job = job_in(State.COMPLETING)
    assert job.reported(NotStored(AWAY), 20.0) == [Park(AWAY)]
    assert job.parked
    assert job.again() == [Action.GO_ON]
    assert job.reported(NotStored(AWAY), 21.0) == [Park()]


def test_an_outcome_that_is_refused_for_too_long_goes_back() -> None:
    job = job_in(State.PARKED)
    job.again()
    (given_up,) = job.reported(NotStored(AWAY), 20.1 + PARKED_FOR_S)
    assert isinstance(given_up, GiveUp)
    assert given_up.error.__cause__ is AWAY


def test_a_refused_outcome_goes_back_at_a_shutdown() -> None:
    job = job_in(State.COMPLETING)
    job.hand_back()
    assert not job.over, "it may be stored yet"
    assert job.reported(NotStored(AWAY), 20.0) == []
    assert job.over
    assert job.again() == []


def test_what_cannot_even_fail_is_given_up() -> None:
    assert job_in(State.COMPLETING).reported(NeverStored(AWAY), 20.0) == [GiveUp(AWAY)]


@pytest.mark.parametrize("state", State)
def test_a_job_is_given_up_once_in_any_state(state: State) -> None:
    job = job_in(state)
    assert job.give_up(AWAY) == ([] if state is State.GIVEN_UP else [GiveUp(AWAY)])
    assert job.over


def test_no_step_is_taken_while_started_is_being_stored() -> None:
    job = job_in(State.FINISHED)
    assert job.started_stored() == [Complete(replay=False)]
    assert job.started_stored() == []


DEADLINE = Outcome({"text": "", "token_ids": []}, finish_reason="deadline")


@pytest.mark.parametrize(
    ("limits", "hard", "warned"),
    [
        (TimeLimits(2.0, None, None), None, 2.0),
        (TimeLimits(None, 2.0, None), None, None),
        (TimeLimits(None, None, 2.0), 2.0, None),
    ],
)
def test_a_limit_decides_how_the_outcome_is_reported(
    limits: TimeLimits, hard: float | None, warned: float | None
) -> None:
    job = Job("task", taken_at=10.0)
    job.begun(REQUEST, limits, None)
    job.generated(DEADLINE, LARGE)
    job.written()
    assert job.limit_s("hard") == hard
    assert job.reported(Completed(None), 13.0) == [Settle(False, None, 3.0, warned)]


def test_a_result_that_is_too_large_fails_unless_the_task_fails_anyway() -> None:
    job = job_in(State.GENERATING)
    (write,) = job.generated(Outcome({"text": "x" * 40_000, "token_ids": []}, finish_reason="length"), 1024)
    assert isinstance(write, WriteEnd)
    assert write.outcome.error is not None


def test_a_recorded_outcome_is_completed_unless_that_is_done() -> None:
    assert job_in(State.QUEUED).recorded(SUCCESS, NO_LIMITS) == [Complete(replay=True)]


def test_events_that_come_too_early_are_mistakes() -> None:
    job = job_in(State.QUEUED)
    for event in (job.written, job.released, job.stale, job.handed_back, job.engine_lost):
        with pytest.raises(JobError):
            event()
    with pytest.raises(JobError):
        job.reported(OtherDelivery.COMPLETED, 20.0)
    with pytest.raises(JobError):
        job_in(State.GENERATING).begun(REQUEST, NO_LIMITS, None)
