"""One generation task in this worker: a state machine, from its delivery until its message is answered.

It is pure: no I/O, no threads, no locks, and no clock but the times that events carry. An event is a method. It
returns the effects that follow, in order. `driver` calls the events on one thread and carries out the effects.

    state          meaning                                                     left by
    QUEUED         the intake is to begin an attempt                           begun, recorded, fail, hand_back
    GENERATING     the engine has the request                                  generated, handed_back, engine_lost
    RELEASING      the engine gave it up; the publisher writes what is left    released
    ENDED          the outcome is known; the publisher writes the last delta   written
    FINISHED       the last delta is written; STARTED is still being stored    started_stored
    COMPLETING     a step of the completion is being taken                     reported
    PARKED         the result backend refuses the outcome: a timer runs        again, hand_back
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

    J1  The outcome is decided once. Only a failure because the stream is damaged replaces an outcome, and only one
        that is not written. So the stored state agrees with the last delta, whichever delivery stores it.
    J2  The first of a stop and the end decides. A generation that ends after a stop is REVOKED, never a success.
        A stop after the end changes nothing here.
    J3  Only an outcome that is written, recorded or impossible to write is completed. An attempt that has lost its
        task to a newer one completes nothing.
    J4  One step of the completion is taken at a time, and none while STARTED is being stored.
    J5  The message is answered at most once, and never before the task is completed, by this delivery or another;
        but what is given up is requeued.
    J6  A job that was asked for its task back, and whose outcome is refused, is over: another worker stores it.

An event that comes late, because its thread could not know what another had done, changes nothing. One that cannot
come at all raises a `JobError`.
"""

from __future__ import annotations

from enum import Enum, auto

from petiole.gpu_worker.request import Request
from petiole.tasks.worker.completion import steps
from petiole.tasks.worker.generation import effects
from petiole.tasks.worker.generation.effects import Effects
from petiole.tasks.worker.generation.limits import TimeLimits
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


WRITING = {State.GENERATING, State.RELEASING, State.ENDED}
"""An attempt is begun, and its stream has no last delta."""
OVER = {State.STANDING_BY, State.SETTLED, State.HANDED_BACK, State.GIVEN_UP}
"""Nothing of the task is to be done here any more."""


class JobError(RuntimeError):
    """An event that cannot come in this state."""


class AlreadyBegun(JobError):  # noqa: N818
    """The intake begins a job twice."""


class NotBegun(JobError):  # noqa: N818
    """The engine or the publisher reports on an attempt that was not begun."""


class NotEnded(JobError):  # noqa: N818
    """A completion reports on a task that has not ended."""


class OutcomeNotStoredError(Exception):
    """The result backend refuses the outcome of a task that has ended."""


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
        self._handing_back = self._storing_started = False
        self._first: steps.Step = steps.Claim()

    # ------------------------------------------------------------ derived

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def parked(self) -> bool:
        return self.state is State.PARKED

    @property
    def how(self) -> steps.How:
        """How the outcome is reported to Celery."""
        assert self.outcome is not None
        limit = self.limits.exceeded(self.outcome)
        if self.outcome.revoked:
            return steps.Announce()
        return steps.TimeOut(limit.after_s) if limit is not None and limit.kind == "hard" else steps.Trace()

    # ------------------------------------------------------------ intake

    def begun(self, start: Request | Outcome, limits: TimeLimits, ending: Ending | None) -> Effects:
        """An attempt has begun with a request, or with the outcome of a task that is not to be generated."""
        if self.state is State.HANDED_BACK:  # meanwhile
            self.state = State.RELEASING
            return [effects.Release()]
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
        return self._complete(steps.Replay())

    def fail(self, error: Exception) -> Effects:
        """The task fails without a last delta: no attempt can be begun, or its stream is damaged."""
        if self.state is not State.QUEUED and self.state not in WRITING:
            return []
        cancel: Effects = [effects.Cancel()] if self.state is State.GENERATING else []
        self.outcome = failed(error)
        return [*cancel, effects.Count(self.outcome), *self._complete(steps.Replay())]

    # ------------------------------------------------------------ engine

    def admitted(self, at: float, ending: Ending | None) -> Effects:
        if not self._is(State.GENERATING):
            return []
        self._admitted_at, self.ending = at, self.ending or ending
        stopped = self.ending is not None
        return [effects.Accept(at, stopped), effects.Cancel()] if stopped else [effects.Accept(at, stopped)]

    def generated(self, outcome: Outcome, limit_bytes: int) -> Effects:
        """The generation has ended. `limit_bytes`: the largest result that can be stored."""
        if not self._is(State.GENERATING):
            return []
        if self.ending is not None and outcome.result is not None:
            return self._end(ended(self.ending))
        return self._end(outcome if self.limits.failed(outcome) else within(limit_bytes, outcome))

    def handed_back(self) -> Effects:
        if not self._is(State.GENERATING):
            return []
        self.state = State.RELEASING
        return [effects.Release()]

    def engine_lost(self) -> Effects:
        """The engine has failed, perhaps because of this task. It is not released, so that a death is counted."""
        if self._is(State.GENERATING):
            self.state = State.HANDED_BACK
        return []

    # ------------------------------------------------------------ publisher

    def written(self) -> Effects:
        """This attempt has written the last delta."""
        if not self._is(State.ENDED):
            return []
        assert self.outcome is not None
        return [effects.Count(self.outcome), *self._complete(steps.Claim())]

    def released(self) -> Effects:
        """All output is in the log, and the task is marked as handed back."""
        if self._is(State.RELEASING):
            self.state = State.HANDED_BACK
        return []

    def stale(self) -> Effects:
        """A newer attempt owns the task."""
        if not self._is(*WRITING):
            return []
        self.state, cancel = State.STANDING_BY, self.state is State.GENERATING
        return [effects.Cancel(), effects.StandBy()] if cancel else [effects.StandBy()]

    def cancel_asked(self, *, flagged: bool) -> Effects:
        """The cancel flag is set (`flagged`), or the stream has no reader."""
        if not self._is(State.GENERATING):
            return []
        if flagged:
            self.ending = self.ending or "revoked"
        return [effects.Cancel()]

    # ------------------------------------------------------------ consumer

    def stop(self, ending: Ending) -> Effects:
        """The task was revoked with `terminate`, or has expired."""
        if self.ending is not None:
            return []
        self.ending = ending
        flag: Effects = [effects.Flag()] if ending == "revoked" else []
        return [*flag, effects.Cancel()] if self.state is State.GENERATING else flag

    def accepted(self) -> Effects:
        """Celery was told that the task runs."""
        if self.state is not State.GENERATING or self.ending is not None:
            return []
        self._storing_started = True
        return [effects.StoreStarted()]

    def hand_back(self) -> Effects:
        """The worker shuts down: let another one continue the task."""
        self._handing_back = True
        if self.state is State.GENERATING:
            return [effects.HandBack()]
        if self.state in {State.QUEUED, State.PARKED}:
            self.state = State.HANDED_BACK
        return []

    # ------------------------------------------------------------ completion

    def started_stored(self) -> Effects:
        self._storing_started = False
        return self._complete(self._first) if self.state is State.FINISHED else []

    def reported(self, report: steps.Report, at: float) -> Effects:
        """What a step of the completion came to, or what a job that stands by has found."""
        if not self._is(State.COMPLETING, State.STANDING_BY, error=NotEnded):
            return []
        match report:
            case steps.Next(step):
                return [effects.Take(step)]
            case steps.Wait(step):
                return [effects.TakeLater(step)]
            case steps.Refused(step, reason):
                return self._park(step, reason, at)
            case steps.Completed(has_failed, value):
                self.state = State.SETTLED
                runtime_s = at - (self._admitted_at or self.taken_at)
                return [effects.Settle(has_failed, value, runtime_s, self._soft_limit_s)]
            case steps.Elsewhere():
                self.state = State.STANDING_BY
                return [effects.StandBy()]
            case steps.Hopeless(error):
                return self.give_up(error)
            case steps.Answered():
                self.state = State.SETTLED
                return []
            case steps.Left():
                self.state = State.SETTLED
                return [effects.Leave()]
            case steps.Silent():
                self.state = State.SETTLED
                return [effects.Requeue()]

    def again(self, step: steps.Step) -> Effects:
        """The time has come to take `step` again."""
        if not self._is(State.COMPLETING, State.PARKED, error=NotEnded):
            return []
        self.state = State.COMPLETING
        return [effects.Take(step)]

    # ------------------------------------------------------------ any

    def give_up(self, error: BaseException) -> Effects:
        """Leave the task to the next delivery, after an unexpected exception. Counts as a death of a task that has
        not ended."""
        if self.state is State.GIVEN_UP:
            return []
        self.state = State.GIVEN_UP
        return [effects.GiveUp(error)]

    # ------------------------------------------------------------ internal

    def _is(self, *states: State, error: type[JobError] = NotBegun) -> bool:
        """Whether the state is one of these. If not, the event is late. Raises `error` if it is too early."""
        if self.state is State.QUEUED:
            raise error(f"task {self.task_id} is not begun")
        return self.state in states

    def _require_queued(self) -> None:
        if self.state is not State.QUEUED:
            raise AlreadyBegun(f"task {self.task_id} is {self.state.name}")

    def _end(self, outcome: Outcome) -> Effects:
        self.state, self.outcome = State.ENDED, outcome
        return [effects.WriteEnd(outcome)]

    def _complete(self, step: steps.Step) -> Effects:
        """Take the first step of the completion, once STARTED is stored."""
        self._first = step
        self.state = State.FINISHED if self._storing_started else State.COMPLETING
        return [] if self._storing_started else [effects.Take(step)]

    def _park(self, step: steps.Step, reason: BaseException, at: float) -> Effects:
        first, self.parked_at = self.parked_at is None, at if self.parked_at is None else self.parked_at
        if at - self.parked_at > PARKED_FOR_S:
            error = OutcomeNotStoredError(self.task_id)
            error.__cause__ = reason
            return self.give_up(error)
        if self._handing_back:
            self.state = State.HANDED_BACK
            return []
        self.state = State.PARKED
        return [effects.TakeLater(step, reason if first else None)]

    @property
    def _soft_limit_s(self) -> float | None:
        """The soft limit, if it ended the generation."""
        assert self.outcome is not None
        limit = self.limits.exceeded(self.outcome)
        return limit.after_s if limit is not None and limit.kind == "soft" else None
