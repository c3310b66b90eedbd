"""The sequence's state machine against a naive model: a list of promises."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from petiole.gpu_worker.scheduling.outcomes import (
    GenerationComplete,
    NotIdle,
    PrefillComplete,
    PrefillNotComplete,
    PrefillOverrun,
)
from tests.support.sequences import Pages, sequence


class SequenceMachine(RuleBasedStateMachine):
    """Random operations against a list of (positions, tokens) promises."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = sequence(7, 9)
        self.pages = Pages(40, 4)
        self.seq.match_and_add_prefix(self.pages, 0)
        self.pending: list[tuple[str, int, int]] = []  # kind, positions, tokens it yields at most
        self.generated: list[int] = []
        self.kv = 0
        self.target, self.recompute = 7, False
        self.next_token = 1000

    @initialize(keeps_state=st.booleans(), goes_ahead=st.booleans())
    def begin(self, keeps_state: bool, goes_ahead: bool) -> None:
        self.seq.keeps_state, self.seq.goes_ahead = keeps_state, goes_ahead

    @property
    def repeated(self) -> int:
        """The inputs before the last token that the next operation computes once more."""
        return 0 if self.pending else 7 + len(self.generated) - self.kv - 1

    def fresh(self, n: int) -> list[int]:
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    @property
    def position(self) -> int:
        return self.kv + sum(op[1] for op in self.pending)

    @property
    def promised(self) -> int:
        return len(self.generated) + sum(op[2] for op in self.pending)

    @rule(chunk=st.integers(1, 7))
    def prefill(self, chunk: int) -> None:
        legal = len(self.pending) < 2 and chunk <= self.target - self.position
        try:
            self.seq.schedule_prefill(chunk)
        except (NotIdle, PrefillComplete, PrefillOverrun):
            assert not legal
            return
        assert legal
        final = self.position + chunk == self.target
        self.pending.append(("prefill", chunk, int(final and not self.recompute)))

    @rule()
    def decode(self) -> None:
        exclusive = any(op[0] == "spec" for op in self.pending) and not self.seq.goes_ahead
        legal = len(self.pending) < 2 and not exclusive and self.position >= self.target and 0 < self.promised < 9
        assert self.seq.can_decode == legal
        if legal:
            self.pending.append(("decode", 1 + self.repeated, 1))
            self.seq.schedule_decode()
        else:
            with pytest.raises((NotIdle, PrefillNotComplete, GenerationComplete)):
                self.seq.schedule_decode()

    @rule(n=st.integers(1, 5))
    def speculate(self, n: int) -> None:
        free = len(self.pending) < 2 if self.seq.goes_ahead else not self.pending
        legal = free and self.position >= self.target and 0 < self.promised <= 9 - n
        if legal:
            self.pending.append(("spec", n + self.repeated, n))
            self.seq.schedule_speculative(n)
        else:
            with pytest.raises((NotIdle, PrefillNotComplete, GenerationComplete)):
                self.seq.schedule_speculative(n)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        kind, positions, yields = self.pending.pop(0)
        if kind == "spec":
            accepted = self.fresh(data.draw(st.integers(1, yields)))
            self.seq.apply_speculative(accepted)
            goes_back = self.seq.keeps_state and len(accepted) < yields
            self.kv += positions - yields + (1 if goes_back else len(accepted))
            self.generated += accepted
            if goes_back and self.pending:
                name, more, most = self.pending[0]
                self.pending[0] = name, more + len(accepted) - 1, most
            assert self.pages.kv_capacity >= 7 + len(self.generated) - 1, "what is computed stays"
            return
        tokens = self.fresh(yields)
        if kind == "prefill":
            self.seq.apply_prefill(*tokens)
        else:
            self.seq.apply_decode(tokens[0])
        self.kv += positions
        self.generated += tokens

    @precondition(lambda self: self.pending)
    @rule()
    def revert(self) -> None:
        self.seq.revert_schedule()
        self.pending.pop()

    @precondition(lambda self: not self.pending)
    @rule(cached=st.integers(0, 3))
    def preempt(self, cached: int) -> None:
        self.seq.release()
        self.kv, self.recompute = cached, bool(self.generated)
        self.target = 7 + max(0, len(self.generated) - 1)
        self.pages = Pages(40, 4)
        self.seq.match_and_add_prefix(self.pages, cached)

    @invariant()
    def agrees(self) -> None:
        assert self.seq.kv_position == self.kv
        assert self.seq.generated == self.generated
        assert self.seq.scheduled_position == self.position
        assert self.seq.inflight_refs == len(self.pending)
        assert self.seq.remaining_tokens == 9 - self.promised
        assert self.seq.in_doubt == sum(op[2] - 1 for op in self.pending if op[0] == "spec")
        assert not self.pending or self.pages.kv_capacity >= self.position


TestSequenceMachine = SequenceMachine.TestCase


TestSequenceMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
