"""One generation task in this worker: a state machine, from its delivery until its message is answered.

It is pure: no I/O, no threads, no locks, and no clock but the times that events carry. An event is a method. It
returns the effects that follow, in order. `driver` calls the events on one thread and carries out the effects.

    state          meaning                                                     left by
    QUEUED         the intake is to begin an attempt                           begun, recorded, fail, hand_back
    GENERATING     the engine has the request                                  generated, handed_back, engine_lost
    RELEASING      the engine gave it up; the publisher writes what is left    released
    ENDED          the outcome is known; the publisher writes the last delta   written
    FINISHED       the last delta is written; STARTED is still being stored    started_stored
    COMPLETING     the completion takes its steps: see `completion`            reported
    PARKED         the outcome cannot be stored yet: a timer runs              again, hand_back
    STANDING_BY    another delivery has the task: see `standby`                reported
    SETTLED        its message is answered: acknowledged or requeued
    HANDED_BACK    its message goes back when the channel closes
    GIVEN_UP       its message is requeued in a moment

        ┌────── hand_back ──────► HANDED_BACK ◄──released── RELEASING ◄──┐
        │                             ▲                                  │handed_back
    QUEUED ──begun──► GENERATING ─────┼─engine_lost                      │
        │                 │  └────────┼──────────────────────────────────┘
        │recorded         │generated  │hand_back
        │                 ▼           │
        │               ENDED         PARKED ◄──refused──┐
        │                 │written      └────again────►  │
        └──────────► FINISHED ──started_stored──► COMPLETING ──completed──► SETTLED
                                                         └──elsewhere──► STANDING_BY ──► SETTLED

    and from every state with an attempt that has not finished:
        stale ──► STANDING_BY          a newer attempt owns the task
        fail ──► FINISHED              its stream is damaged
    and from every state:
        give_up ──► GIVEN_UP           after an unexpected exception

Who brings the events:

    intake thread        begun, recorded, fail
    engine's text thread admitted, generated, handed_back, engine_lost
    publisher thread     written, released, stale, fail, cancel_asked, give_up
    completion threads   started_stored, reported, again
    consumer's thread    stop, hand_back, accepted, reported
    any                  give_up

Invariants:

    J1  The outcome is decided once, with one exception: if the stream is damaged, a failure replaces an outcome
        that is not written. So the stored state agrees with the last delta, whichever delivery stores it.
    J2  If both a stop and the end come, the first decides. A generation that ends after a stop is REVOKED, never a
        success. A stop after the end changes nothing here.
    J3  Only an outcome that is written, recorded or impossible to write is completed. An attempt that has lost its
        task to a newer one completes nothing.
    J4  The completion takes one step at a time, and none while STARTED is being stored.
    J5  The message is answered at most once, and never before the task is completed, by this delivery or another.
        The exception is a job that is given up: its message is requeued.
    J6  If the outcome of a job is refused after the job was told to hand its task back, the job is over: another
        worker stores the outcome.

An event that comes late, because its thread could not know what another thread had done, changes nothing. An event
that is impossible in a state raises a `JobError`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import wraps
from typing import Concatenate, ParamSpec

from petiole.gpu_worker.request import Request
from petiole.tasks.worker.completion.reports import Completed, NeverStored, NotStored, OtherDelivery, Report
from petiole.tasks.worker.delivery.delivery import Kind, TimeLimits
from petiole.tasks.worker.generation import effects
from petiole.tasks.worker.generation.effects import Action, Effects
from petiole.tasks.worker.output.outcomes import Ending, Outcome, ended, failed, within

PARKED_FOR_S = 300.0
"""How long a refused outcome is tried again before the message goes back."""


class State(Enum):
    QUEUED = auto()
    GENERATING = auto()
    RELEASING = auto()
    ENDED = auto()
    FINISHED = auto()
    COMPLETING = auto()
    PARKED = auto()
    STANDING_BY = auto()
    SETTLED = auto()
    HANDED_BACK = auto()
    GIVEN_UP = auto()


WRITING = (State.GENERATING, State.RELEASING, State.ENDED)
"""An attempt is begun, and its stream has no last delta."""
OVER = {State.STANDING_BY, State.SETTLED, State.HANDED_BACK, State.GIVEN_UP}
"""Nothing is left to do for the task here."""


class JobError(RuntimeError):
    """An event that cannot come in this state."""


class OutcomeNotStoredError(Exception):
    """The result backend refuses the outcome of a task that has ended."""


P = ParamSpec("P")
Event = Callable[Concatenate["Job", P], Effects]


def during(*states: State) -> Callable[[Event[P]], Event[P]]:
    """Marks an event of these states. In a later state the event is late and changes nothing. While the job is
    queued, the event is impossible."""

    def decorator(event: Event[P]) -> Event[P]:
        @wraps(event)
        def happen(job: Job, /, *facts: P.args, **named: P.kwargs) -> Effects:
            if job.state is State.QUEUED:
                raise JobError(f"task {job.task_id}: {event.__name__}, but no attempt has begun")
            return event(job, *facts, **named) if job.state in states else []

        return happen

    return decorator


class Job:
    """The state machine. Times are those of `time.monotonic`, in seconds.

    `outcome` is None until the task has ended. `ending` is the first stop, which may be too late. `parked_at` is
    when the outcome was first refused.
    """

    def __init__(self, task_id: str, taken_at: float) -> None:
        self.task_id, self.taken_at = task_id, taken_at
        self.state = State.QUEUED
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self.parked_at: float | None = None
        self.limits = TimeLimits(None, None, None)
        self._admitted_at: float | None = None
        self._handing_back = self._storing_started = self._replay = False

    # ------------------------------------------------------------ derived

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def parked(self) -> bool:
        return self.state is State.PARKED

    def limit_s(self, kind: Kind) -> float | None:
        """The time limit of this kind, if it ended the generation."""
        return None if self.outcome is None else self.limits.exceeded(kind, self.outcome)

    # ------------------------------------------------------------ intake

    def begun(self, start: Request | Outcome, limits: TimeLimits, ending: Ending | None) -> Effects:
        """An attempt has begun with a request, or with the outcome of a task that is not to be generated."""
        if self.state is State.HANDED_BACK:  # meanwhile
            self.state = State.RELEASING
            return [Action.RELEASE]
        self._require_queued()
        self.limits, self.ending = limits, self.ending or ending
        if self.ending is not None:
            return self._end(ended(self.ending))
        if isinstance(start, Outcome):
            return self._end(start)
        self.state = State.GENERATING
        return [effects.Submit(start)]

    def recorded(self, outcome: Outcome, limits: TimeLimits) -> Effects:
        """An earlier delivery has finished the task."""
        if self.state is State.HANDED_BACK:
            return []
        self._require_queued()
        self.outcome, self.limits = outcome, limits
        return self._complete(replay=True)

    def fail(self, error: Exception) -> Effects:
        """The task fails without a last delta: no attempt can be begun, or its stream is damaged."""
        if self.state is not State.QUEUED and self.state not in WRITING:
            return []
        cancel: Effects = [Action.CANCEL] if self.state is State.GENERATING else []
        self.outcome = failed(error)
        return [*cancel, effects.Count(self.outcome), *self._complete(replay=True)]

    # ------------------------------------------------------------ engine

    @during(State.GENERATING)
    def admitted(self, at: float, ending: Ending | None) -> Effects:
        self._admitted_at, self.ending = at, self.ending or ending
        return [effects.Accept(at)] if self.ending is None else [Action.CANCEL]

    @during(State.GENERATING)
    def generated(self, outcome: Outcome, limit_bytes: int) -> Effects:
        """The generation has ended. `limit_bytes`: the largest result that can be stored."""
        if self.ending is not None and outcome.result is not None:
            return self._end(ended(self.ending, outcome))
        timed_out = self.limits.exceeded("hard", outcome) is not None
        return self._end(outcome if timed_out else within(limit_bytes, outcome))

    @during(State.GENERATING)
    def handed_back(self) -> Effects:
        self.state = State.RELEASING
        return [Action.RELEASE]

    @during(State.GENERATING)
    def engine_lost(self) -> Effects:
        """The engine has failed, perhaps because of this task. It is not released, so that a death is counted."""
        self.state = State.HANDED_BACK
        return []

    # ------------------------------------------------------------ publisher

    @during(State.ENDED)
    def written(self) -> Effects:
        """This attempt has written the last delta."""
        assert self.outcome is not None
        return [effects.Count(self.outcome), *self._complete(replay=False)]

    @during(State.RELEASING)
    def released(self) -> Effects:
        """All output is in the log, and the task is marked as handed back."""
        self.state = State.HANDED_BACK
        return []

    @during(*WRITING)
    def stale(self) -> Effects:
        """A newer attempt owns the task."""
        generating, self.state = self.state is State.GENERATING, State.STANDING_BY
        return [Action.CANCEL, Action.STAND_BY] if generating else [Action.STAND_BY]

    @during(State.GENERATING)
    def cancel_asked(self, *, flagged: bool) -> Effects:
        """The cancel flag is set (`flagged`), or the stream has no reader."""
        if flagged:
            self.ending = self.ending or "revoked"
        return [Action.CANCEL]

    # ------------------------------------------------------------ consumer

    def stop(self, ending: Ending) -> Effects:
        """The task was revoked with `terminate`, or has expired."""
        if self.ending is not None:
            return []
        self.ending = ending
        flag: Effects = [Action.FLAG] if ending == "revoked" else []
        return [*flag, Action.CANCEL] if self.state is State.GENERATING else flag

    def accepted(self) -> Effects:
        """Celery was told that the task runs."""
        if self.state is not State.GENERATING or self.ending is not None:
            return []
        self._storing_started = True
        return [Action.STORE_STARTED]

    def hand_back(self) -> Effects:
        """The worker shuts down: let another one continue the task."""
        self._handing_back = True
        if self.state is State.GENERATING:
            return [Action.HAND_BACK]
        if self.state in {State.QUEUED, State.PARKED}:
            self.state = State.HANDED_BACK
        return []

    # ------------------------------------------------------------ completion

    def started_stored(self) -> Effects:
        self._storing_started = False
        return self._complete(replay=self._replay) if self.state is State.FINISHED else []

    @during(State.COMPLETING, State.STANDING_BY)
    def reported(self, report: Report, at: float) -> Effects:
        """The outcome of the completion, or the finding of a standby."""
        match report:
            case NotStored(reason):
                return self._park(reason, at)
            case NeverStored(error):
                return self.give_up(error)
            case OtherDelivery.CLAIMED:
                self.state = State.STANDING_BY
                return [Action.STAND_BY]
        self.state = State.SETTLED
        match report:
            case Completed(value):
                runtime_s = at - (self._admitted_at or self.taken_at)
                return [effects.Settle(report.failed, value, runtime_s, self.limit_s("soft"))]
            case OtherDelivery.COMPLETED:
                return [Action.LEAVE]
            case OtherDelivery.SILENT:
                return [Action.REQUEUE]
            case OtherDelivery.ANSWERED:
                return []

    @during(State.PARKED)
    def again(self) -> Effects:
        """The time has come to try the refused outcome again."""
        self.state = State.COMPLETING
        return [Action.GO_ON]

    # ------------------------------------------------------------ any

    def give_up(self, error: BaseException) -> Effects:
        """Leave the task to the next delivery, after an unexpected exception. Counts as a death of a task that has
        not ended."""
        if self.state is State.GIVEN_UP:
            return []
        self.state = State.GIVEN_UP
        return [effects.GiveUp(error)]

    # ------------------------------------------------------------ internal

    def _require_queued(self) -> None:
        if self.state is not State.QUEUED:
            raise JobError(f"task {self.task_id} is {self.state.name}, and its attempt begins")

    def _end(self, outcome: Outcome) -> Effects:
        self.state, self.outcome = State.ENDED, outcome
        return [effects.WriteEnd(outcome)]

    def _complete(self, *, replay: bool) -> Effects:
        """Begin the completion, once STARTED is stored."""
        self._replay = replay
        self.state = State.FINISHED if self._storing_started else State.COMPLETING
        return [] if self._storing_started else [effects.Complete(replay)]

    def _park(self, reason: BaseException, at: float) -> Effects:
        first, self.parked_at = self.parked_at is None, at if self.parked_at is None else self.parked_at
        if at - self.parked_at > PARKED_FOR_S:
            error = OutcomeNotStoredError(self.task_id)
            error.__cause__ = reason
            return self.give_up(error)
        if self._handing_back:
            self.state = State.HANDED_BACK
            return []
        self.state = State.PARKED
        return [effects.Park(reason if first else None)]
