"""While the broker is known to be away, one caller probes and the others fail at once."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from petiole.tasks.app.amqp import PAUSE_S, Breaker
from petiole.tasks.errors import NoWorker, Unavailable

DOWN = Unavailable("redis://h", "refused")


class Callers(RuleBasedStateMachine):
    """Any number of callers, beside a model: a list of those that try, and when the last one failed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(lambda: self.now)
        self.trying: list[tuple[ExitStack, bool]] = []
        self.failed_at: float | None = None

    @rule(seconds=st.sampled_from([0.1, PAUSE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def submit(self) -> None:
        probes = self.failed_at is not None
        paused = probes and self.now < self.failed_at + PAUSE_S
        stack = ExitStack()
        if paused or (probes and any(probing for _, probing in self.trying)):
            with pytest.raises(Unavailable, match="refused"):
                stack.enter_context(self.breaker.attempt())
        else:
            stack.enter_context(self.breaker.attempt())
            self.trying.append((stack, probes))

    @precondition(lambda self: self.trying)
    @rule(which=st.integers(0, 5), ending=st.sampled_from(["sent", "down", "other"]))
    def end(self, which: int, ending: str) -> None:
        stack, _ = self.trying.pop(which % len(self.trying))
        error = {"sent": None, "down": DOWN, "other": NoWorker("x", 1.0)}[ending]
        assert not stack.__exit__(type(error) if error else None, error, None)
        if ending == "sent":
            self.failed_at = None
        elif ending == "down":
            self.failed_at = self.now

    @invariant()
    def a_probe_is_alone(self) -> None:
        assert sum(probing for _, probing in self.trying) <= 1


TestCallers = Callers.TestCase


def test_a_probe_ends_well_if_another_caller_closes_the_breaker_just_before_it() -> None:
    """Between the look at what is known and the look at the clock."""
    now, meanwhile = 0.0, ExitStack()

    def clock() -> float:
        meanwhile.close()
        return now

    breaker = Breaker(clock)
    meanwhile.enter_context(breaker.attempt())  # a slow one, which succeeds when the next one looks at the clock
    slow, meanwhile = meanwhile, ExitStack()
    with suppress(Unavailable), breaker.attempt():
        raise DOWN
    now, meanwhile = PAUSE_S, slow
    with breaker.attempt():
        """It probes."""
    with breaker.attempt(), breaker.attempt():
        """The breaker is closed."""
    for _ in range(2):
        with suppress(Unavailable), breaker.attempt():
            raise DOWN
        now += PAUSE_S
    with breaker.attempt(), pytest.raises(Unavailable), breaker.attempt():
        """One probes, and one alone."""


def test_a_forked_child_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = Breaker(lambda: 0.0)

    @contextmanager
    def in_process(number: int):  # type: ignore[no-untyped-def]
        monkeypatch.setattr("os.getpid", lambda: number)
        with breaker.attempt():
            yield

    with pytest.raises(Unavailable), in_process(1):
        raise DOWN
    with in_process(2):
        pass
    with pytest.raises(Unavailable), in_process(1):
        raise AssertionError("it is open there")
