"""The job's state machine against a naive model: who still owes it an event, and which came first, stop or end."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from petiole.gpu_worker.request import Request
from petiole.tasks.worker.completion.reports import Completed, NeverStored, NotStored, OtherDelivery, Report
from petiole.tasks.worker.delivery.delivery import TimeLimits
from petiole.tasks.worker.generation import effects
from petiole.tasks.worker.generation.effects import Action, Effect, Effects
from petiole.tasks.worker.generation.job import Job, State
from petiole.tasks.worker.output.outcomes import Ending, Outcome, ended
from tests.support.jobs import LARGE, SUCCESS

ENDINGS = st.sampled_from(["revoked", "expired"])
OUTCOMES = st.sampled_from(
    [
        SUCCESS,
        Outcome({"text": "", "token_ids": []}, finish_reason="deadline"),
        Outcome(error=ValueError("failed")),
    ]
)
RARELY = st.sampled_from([False] * 7 + [True])
RARELY_ENDING = st.sampled_from([None] * 5 + ["revoked", "expired"])
LIMITS = st.sampled_from([TimeLimits(1, None, None), TimeLimits(None, None, 1), TimeLimits(None, None, None)])
REPORTS = st.sampled_from(
    [
        Completed(None),
        OtherDelivery.CLAIMED,
        OtherDelivery.COMPLETED,
        OtherDelivery.ANSWERED,
        NeverStored(ValueError()),
    ]
    + [NotStored(ConnectionError())] * 4
)
WATCHED = st.sampled_from([OtherDelivery.COMPLETED, OtherDelivery.SILENT, OtherDelivery.ANSWERED])


def owed(who: str):  # type: ignore[no-untyped-def]
    """A rule that is possible while `who` owes the job an event."""
    return precondition(lambda self: who in self.owing)


class JobMachine(RuleBasedStateMachine):
    """Any thread may be late: what one owes it still brings after another has ended the job."""

    def __init__(self) -> None:
        super().__init__()
        self.job, self.now = Job("task", 0.0), 0.0
        self.owing = {"intake"}
        self.stop_first: Ending | None = None
        self.to_write: Outcome | None = None
        self.in_log: Outcome | None = None
        self.recorded = self.handing_back = False
        self.answers = 0

    def follow(self, what: Effects) -> None:
        for effect in what:
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case effects.Submit():
                assert self.stop_first is None
                self.owing |= {"engine", "admission", "publisher"}
            case Action.CANCEL | Action.HAND_BACK:
                assert "engine" in self.owing, "J2: only what generates is ended"
            case Action.RELEASE:
                self.owing.add("publisher")
            case effects.WriteEnd(outcome):
                assert self.to_write is None, "J1"
                self.to_write = outcome
                self.owing.add("publisher")
            case effects.Accept():
                self.owing.add("acceptance")
            case Action.STORE_STARTED:
                self.owing.add("started")
            case effects.Complete(replay):
                assert not self.owing & {"step", "started"}, "J4"
                assert self.in_log is not None or self.recorded or replay, "J3"
                self.owing.add("step")
            case Action.GO_ON:
                assert not self.owing & {"step", "started"}, "J4"
                self.owing.add("step")
            case effects.Park():
                self.owing.add("timer")
            case Action.STAND_BY:
                self.owing.add("watch")
            case effects.Settle() | Action.LEAVE | Action.REQUEUE:
                self.answers += 1

    # ------------------------------------------------------------ intake

    @owed("intake")
    @rule(limits=LIMITS, ending=RARELY_ENDING, refused=RARELY)
    def begin(self, limits: TimeLimits, ending: Ending | None, refused: bool) -> None:
        self.owing.discard("intake")
        self.stop_first = self.stop_first or ending
        self.follow(self.job.begun(SUCCESS if refused else Request(prompt=[1]), limits, ending))

    @owed("intake")
    @rule(so=RARELY, damaged=st.booleans())
    def not_begun(self, so: bool, damaged: bool) -> None:
        if not so:
            return
        self.owing.discard("intake")
        self.recorded = True
        event = (
            self.job.fail(ValueError()) if damaged else self.job.recorded(SUCCESS, TimeLimits(None, None, None))
        )
        self.follow(event)

    # ------------------------------------------------------------ engine

    @owed("admission")
    @rule(ending=RARELY_ENDING)
    def admit(self, ending: Ending | None) -> None:
        self.owing.discard("admission")
        if self.job.state is State.GENERATING:
            self.stop_first = self.stop_first or ending
        self.follow(self.job.admitted(self.now, ending))

    @owed("engine")
    @rule(outcome=OUTCOMES)
    def generate(self, outcome: Outcome) -> None:
        self.owing -= {"engine", "admission"}
        still_here, before = self.job.state is State.GENERATING, self.to_write
        self.follow(self.job.generated(outcome, LARGE))
        if still_here:
            stopped = self.stop_first is not None and outcome.error is None
            assert self.to_write == (ended(self.stop_first) if stopped else outcome), "J2"  # type: ignore[arg-type]
        else:
            assert self.to_write is before

    @owed("engine")
    @rule(so=RARELY, lost=st.booleans())
    def give_back(self, so: bool, lost: bool) -> None:
        if not so:
            return
        self.owing -= {"engine", "admission"}
        self.follow(self.job.engine_lost() if lost else self.job.handed_back())

    # ------------------------------------------------------------ publisher

    @owed("publisher")
    @rule()
    def write(self) -> None:
        if self.job.state is State.ENDED:
            self.in_log = self.to_write
            self.owing.discard("publisher")
            self.follow(self.job.written())
        elif self.job.state is State.RELEASING:
            self.owing.discard("publisher")
            self.follow(self.job.released())

    @owed("publisher")
    @rule(flagged=st.booleans())
    def ask_to_cancel(self, flagged: bool) -> None:
        if flagged and self.job.state is State.GENERATING:
            self.stop_first = self.stop_first or "revoked"
        self.follow(self.job.cancel_asked(flagged=flagged))

    @owed("publisher")
    @rule(so=RARELY, stale=st.booleans())
    def lose(self, so: bool, stale: bool) -> None:
        if not so:
            return
        self.owing.discard("publisher")
        self.recorded = self.recorded or not stale
        self.follow(self.job.stale() if stale else self.job.fail(ValueError("damaged")))

    # ------------------------------------------------------------ completion

    @owed("step")
    @rule(report=REPORTS, late=st.sampled_from([0.1, 400.0]))
    def report(self, report: Report, late: float) -> None:
        self.owing.discard("step")
        self.now += late
        self.follow(self.job.reported(report, self.now))

    @owed("started")
    @rule()
    def store_started(self) -> None:
        self.owing.discard("started")
        self.follow(self.job.started_stored())

    @owed("timer")
    @rule()
    def ring(self) -> None:
        self.owing.discard("timer")
        self.follow(self.job.again())

    @owed("watch")
    @rule(report=WATCHED)
    def watch(self, report: Report) -> None:
        self.owing.discard("watch")
        self.follow(self.job.reported(report, self.now))

    # ------------------------------------------------------------ consumer

    @owed("acceptance")
    @rule()
    def accept(self) -> None:
        self.owing.discard("acceptance")
        self.follow(self.job.accepted())

    @rule(so=RARELY, ending=ENDINGS)
    def stop(self, so: bool, ending: Ending) -> None:
        if not so:
            return
        if self.job.ending is None:
            self.stop_first = ending
        self.follow(self.job.stop(ending))

    @rule(so=RARELY)
    def hand_back(self, so: bool) -> None:
        if so:
            self.handing_back = True
            self.follow(self.job.hand_back())

    @rule(so=RARELY)
    def give_up(self, so: bool) -> None:
        if so:
            self.owing.discard("intake")
            self.follow(self.job.give_up(ValueError()))

    # ------------------------------------------------------------ at any time

    @invariant()
    def the_outcome_is_what_was_written(self) -> None:
        if self.in_log is not None:
            assert self.job.outcome == self.in_log, "J1"

    @invariant()
    def it_is_answered_at_most_once(self) -> None:
        assert self.answers <= 1, "J5"

    @invariant()
    def a_job_that_is_not_over_waits_for_somebody(self) -> None:
        assert self.job.over or self.owing, self.job.state

    @invariant()
    def a_refused_outcome_does_not_wait_out_a_shutdown(self) -> None:
        assert not (self.job.parked and self.handing_back), "J6"


TestJobMachine = JobMachine.TestCase
TestJobMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
