"""Two verifications of one sequence in flight: the same tokens, no idle device, each rule broken on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from petiole.cache import GroupedTable, KVAllocation, WindowPages, most_pages
from petiole.cache.groups import recurrent_states
from petiole.gpu_worker import Constraint, Engine, EngineConfig, EngineError, Request
from petiole.gpu_worker.runtime.interface import DRAFTED, StepBatch
from petiole.gpu_worker.scheduling import masks
from petiole.gpu_worker.scheduling.launching import Preparation
from petiole.gpu_worker.scheduling.outcomes import Operation
from petiole.gpu_worker.scheduling.sequence import SchedulableSequence
from petiole.gpu_worker.scheduling.stopping import StopRules
from petiole.gpu_worker.speculation import HeadProposer, Launched, NgramProposer, Price
from tests.support.toy_engine import (
    NAPS,
    Bold,
    BoldHeadProposer,
    BoldProposer,
    Expected,
    expected,
    request,
    toy_engine,
)
from tests.support.toy_text import ToyConstraint

K = 6
REQUESTS = [
    request(
        [3 + i, 4, 5, 6][: 1 + i % 4],
        30 + i,
        temperature=0.7 * (i % 2),
        frequency_penalty=0.5 * (i % 3 == 1),
        min_tokens=20 * (i % 3 == 2),
        ignore_eos=i % 3 != 2,
        request_id=f"r{i}",
    )
    for i in range(6)
]
CONSTRAINED = [
    request(
        [1 + i, 2, 3], 20, constraint=Constraint("regex", 6 + i), temperature=0.8 * (i % 2), request_id=f"c{i}"
    )
    for i in range(4)
]
STOPPED = [
    request([1, 4, 13, 40, 25, 28, 37], 80, stop_token_ids=[end], request_id=f"s{end}") for end in range(20)
]
WINDOWS = {"windows": [WindowPages(7, 250)]}
STATES = {"snapshots": 20}


def late() -> None:
    """Half a millisecond for each task: the host is always ahead."""
    time.sleep(0.0005)


class Knowing(Bold):
    """Drafts the answer."""

    def __init__(self, asked: Request, naps: Sequence[int] = (0,)) -> None:
        super().__init__(naps)
        self._answer = [*(asked.prompt or ()), *expected(asked).token_ids]

    def guess(self, count: int) -> list[int]:
        return self._answer[len(self._tokens) :][:count]


class KnowingProposer:
    def __init__(self, asked: Sequence[Request]) -> None:
        self._asked = asked

    def drafter(self, tokens: Sequence[int]) -> Knowing:
        drafter = Knowing(next(one for one in self._asked if list(one.prompt or ()) == list(tokens)))
        drafter.extend(tokens)
        return drafter


class Watched:
    """An engine over the toy, and the steps that it launched. config: for `EngineConfig`."""

    def __init__(
        self, by: str, right: float, asked: Sequence[Any], config: Mapping[str, Any] | None = None, **machine: Any
    ) -> None:
        self.batches: list[StepBatch] = []
        settings = {"proposer": KnowingProposer(asked) if by == "host" else BoldProposer(), **(config or {})}
        if by == "runtime":
            machine = {"drafts": K, "right": right, **machine}
            settings = {"proposer": BoldHeadProposer([DRAFTED] * K), **(config or {})}
        engine = toy_engine(machine=machine, jitter=late, speculative_tokens=K, **settings)
        launch = engine.runtime.launch_forward

        def forward(slot_id: int, batch: StepBatch) -> None:
            self.batches.append(batch)
            launch(slot_id, batch)

        engine.runtime.launch_forward = forward  # type: ignore[method-assign]
        self.agrees = self._agree(engine, asked)

    @staticmethod
    def _agree(engine: Engine, asked: Sequence[Any]) -> bool:
        engine.start()
        try:
            results = engine.generate(asked)
            for name in ("draft_tokens", "accepted_draft_tokens"):
                assert sum(getattr(result, name) for result in results) == engine.stats()[name], name
            return [Expected.of(result) for result in results] == [expected(r) for r in asked]
        except (AssertionError, EngineError):
            return False
        finally:
            engine.shutdown(drain=False)

    @property
    def in_doubt(self) -> int:
        """How many verifications were launched behind one of the same row."""
        return sum(
            int(((batch.in_doubt > 0) & (batch.outputs > 1)).sum())
            for batch in self.batches
            if batch.in_doubt is not None
        )


@pytest.mark.parametrize("machine", [{}, WINDOWS, STATES, {"goes_ahead": False}], ids=str)
@pytest.mark.parametrize("right", [0, 0.7, 0.95, 1])
@pytest.mark.parametrize("by", ["runtime", "ngram"])
def test_drafts_in_flight_change_no_token(by: str, right: float, machine: dict[str, Any]) -> None:
    found = Watched(by, right, [*REQUESTS, *CONSTRAINED], **machine)
    assert found.agrees
    assert (found.in_doubt > 0) == machine.get("goes_ahead", True)


def test_right_drafts_take_the_fewest_steps() -> None:
    """Each step yields all of its tokens, and none waits for another."""
    alone = [request([3, 4], 1 + 10 * (1 + K), ignore_eos=True)]
    found = Watched("runtime", 1, alone)
    assert found.agrees
    outputs = [batch.outputs.tolist() for batch in found.batches]
    assert outputs == [[1], *[[1 + K]] * 10]
    assert sum(batch.in_doubt is not None for batch in found.batches) == 9


def test_drafts_behind_uncertain_tokens_wait_until_these_are_known() -> None:
    """The text repeats, and prompt lookup is not sure of it yet: each verification is of an idle row."""
    proposer, seen = NgramProposer(), list[bool]()
    engine = toy_engine(speculative_tokens=K, proposer=proposer, jitter=late)
    launch = engine.runtime.launch_forward

    def forward(slot_id: int, batch: StepBatch) -> None:
        seen.extend((batch.in_doubt is not None) for n in batch.outputs.tolist() if n > 1)
        launch(slot_id, batch)

    engine.runtime.launch_forward = forward  # type: ignore[method-assign]
    asked = request([1, 4, 13, 40, 25, 28, 37, 16, 1, 4], 40, ignore_eos=True)
    with engine:
        assert Expected.of(engine.generate([asked])[0]) == expected(asked)
    assert seen
    assert not seen[0]


def test_a_head_of_which_nothing_holds_soon_drafts_nothing() -> None:
    """Rows that rest are not asked, and their steps are those of rows without drafts."""
    asked = [request([3 + i, 4], 80, ignore_eos=True) for i in range(2)]
    found = Watched("runtime", 0, asked, {"proposer": HeadProposer([DRAFTED] * K)})
    assert found.agrees
    ahead = [0 if batch.ahead is None else int(batch.ahead.sum()) for batch in found.batches]
    assert 0 < np.count_nonzero(ahead) < len(ahead) / 2
    assert all(batch.lengths.max() == 1 for batch in found.batches[40:])


class Sleepy(Knowing):
    """Rests now and then. early: calls that came while it did."""

    def __init__(self, asked: Request) -> None:
        super().__init__(asked, NAPS)
        self.early, self.told, self._due = list[str](), 0, 0

    def _check(self, call: str) -> None:
        if len(self._tokens) < self._due:
            self.early.append(call)

    def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
        super().extend(tokens, n_drafts, n_held)
        self.told += n_drafts
        if not n_drafts:
            self._check("extend")

    def rests(self, price: Price, *, in_flight: bool) -> int:
        nap = super().rests(price, in_flight=in_flight)
        self._due = len(self._tokens) + nap
        return nap

    def worth(self, price: Price, *, in_flight: bool) -> int:
        self._check("worth")
        return super().worth(price, in_flight=in_flight)


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_a_drafter_that_rests_gets_its_tokens_later_and_is_asked_for_nothing_before(pipeline: str) -> None:
    asked = request([1, 4, 13, 40, 25, 28, 37], 80, ignore_eos=True)
    drafter = Sleepy(asked)

    class Proposer:
        def drafter(self, tokens: Sequence[int]) -> Sleepy:
            drafter.extend(tokens)
            return drafter

    with toy_engine(speculative_tokens=K, proposer=Proposer(), pipeline=pipeline) as engine:
        assert Expected.of(engine.generate([asked])[0]) == expected(asked)
        stats = engine.stats()
    assert not drafter.early
    text = [*(asked.prompt or ()), *expected(asked).token_ids]
    assert [*map(ord, drafter._tokens)] == text[: len(drafter._tokens)]
    drafted = int(stats["draft_tokens"])
    assert stats["accepted_draft_tokens"] == drafted > 2 * K, "what it does not know it would guess wrongly"
    assert drafted - K <= drafter.told <= drafted, "outcomes are told at once, but for the end"


def test_a_row_that_cannot_reach_its_end_for_certain_waits() -> None:
    """Budgets count the most tokens, so that no step is launched for tokens that nobody wants."""
    found = Watched("runtime", 0, [request([3, 4], 12, ignore_eos=True)])
    assert found.agrees
    assert sum(len(batch.outputs) > 0 for batch in found.batches) == 12


@pytest.mark.parametrize("machine", [{}, STATES], ids=str)
@pytest.mark.parametrize("by", ["runtime", "host"])
def test_two_verifications_fit_into_the_smallest_pool_of_a_window(by: str, machine: dict[str, Any]) -> None:
    """Chunks of one position, and right drafts alone: these decide how many pages a row needs. None is cut."""
    longest = EngineConfig(chunk_size=1, speculative_tokens=K).longest_step
    pool = WindowPages(7, 1 + most_pages(7, 1, longest))
    found = Watched(
        by, 1, [request([3, 4], 1 + 10 * (1 + K), ignore_eos=True)], {"chunk_size": 1}, windows=[pool], **machine
    )
    assert found.agrees
    assert found.in_doubt >= 8
    outputs = [batch.outputs.tolist() for batch in found.batches]
    assert outputs == [[0], [1], *[[1 + K]] * 10]


# ---------------------------------------------------------------- each rule, broken


def one_mask(state: ToyConstraint, drafts: Sequence[int], out: np.ndarray) -> None:
    """In place of the mask behind each prefix of the drafts, the first one everywhere."""
    state.fill_mask(out[0])
    out[1:] = out[0]


TRIM, CUT = KVAllocation.trim, StopRules.cut
BROKEN: dict[str, tuple[Any, str, Any, dict[str, Any], Sequence[Any]]] = {
    "rows in doubt are not told": (SchedulableSequence, "in_doubt", 0, {}, REQUESTS),
    "an operation does not grow": (Operation, "_replace", lambda op, **_: op, STATES, REQUESTS),
    "pages of a step in flight are freed": (
        KVAllocation,
        "trim",
        lambda self, n: TRIM(self, max(self.published, n - 1 - K)),
        {},
        REQUESTS,
    ),
    "a chain has no pages of its own": (
        Preparation,
        "_ahead",
        lambda self, *_: None if self._plan.ahead is None else np.array(self._plan.ahead, np.int32),
        {},
        REQUESTS,
    ),
    "masks do not wait": (masks, "awaiting_commit", lambda *_: [], {}, CONSTRAINED),
    "masks do not follow the drafts": (masks, "fill_draft_masks", one_mask, {}, CONSTRAINED),
    "what follows an end is kept": (
        StopRules,
        "cut",
        lambda self, generated, fresh: (len(fresh), CUT(self, generated, fresh)[1]),
        {},
        STOPPED,
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, machine, asked = BROKEN[rule]
    by = "host" if asked is CONSTRAINED else "runtime"
    assert Watched(by, 0.7, asked, **machine).agrees
    monkeypatch.setattr(owner, name, instead)
    assert not Watched(by, 0.7, asked, **machine).agrees


def test_windows_slide_to_where_rows_may_begin_at_the_earliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts of the step, and of the one before it, may be rejected."""
    slide, slid = GroupedTable.slide, list[np.ndarray]()

    def sliding(self: GroupedTable, rows: np.ndarray, starts: np.ndarray) -> None:
        slid.append(starts)
        slide(self, rows, starts)

    monkeypatch.setattr(GroupedTable, "slide", sliding)
    found = Watched("runtime", 0.7, REQUESTS, **WINDOWS)
    assert found.agrees
    assert found.in_doubt
    for batch, starts in zip(found.batches, slid, strict=True):
        doubt = 0 if batch.in_doubt is None else batch.in_doubt
        rejected = np.maximum(batch.outputs - 1, 0)
        assert (starts == batch.starts - doubt + batch.lengths - rejected).all()


@pytest.mark.parametrize("waits", [True, False])
def test_no_snapshot_lies_in_doubt(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_states, "EVERY", 8)
    if not waits:
        monkeypatch.setattr(recurrent_states.StateGroup, "before_next", lambda *_: None)
    all_made = True
    for right in (0.7, 1):
        found = Watched("runtime", right, [request([5], 60, ignore_eos=True)], **STATES)
        assert found.agrees
        made = np.concatenate([batch.states.positions for batch in found.batches if batch.states is not None])
        all_made &= {8, 16, 24, 32, 40, 48, 56} <= set(made.tolist())
    assert all_made == waits


def test_a_hand_back_and_a_cancel_find_two_verifications_in_flight() -> None:
    engine = toy_engine(
        machine={"drafts": K, "right": 1},
        jitter=late,
        speculative_tokens=K,
        proposer=BoldHeadProposer([DRAFTED] * K),
    )
    with engine:
        for how in ("cancel", "hand_back"):
            asked = request([3, 4], 80, ignore_eos=True)
            seen: list[int] = []
            handle = engine.submit(asked, on_delta=_counting(seen))
            while len(seen) < 5:
                time.sleep(0)
            getattr(handle, how)()
            _rest(engine)
            engine.check_invariants()
            assert seen == list(expected(asked).token_ids)[: len(seen)]


def _counting(seen: list[int]) -> Callable[[Any, Any], None]:
    return lambda handle, delta: seen.extend(delta.token_ids)


def _rest(engine: Engine) -> None:
    while engine.stats()["rows_held"]:
        engine._call(lambda: None)


@pytest.mark.parametrize("count", [3, 9, 10, 16])
def test_prompt_lookup_goes_ahead_of_as_many_tokens_as_it_is_sure_of(count: int) -> None:
    drafter = NgramProposer().drafter([1, 2, 3, 4, 5] * 200)
    launched = drafter.propose(count)
    assert launched is not None
    assert len(launched) == len(drafter.propose(count, Launched(launched)) or ()) == count
