"""Constrained decoding and speculation through the one path: same tokens, gated sampling, statistics."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from petiole.gpu_worker import (
    Constraint,
    Engine,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
)
from petiole.gpu_worker.scheduling.pipeline import PendingCommit
from petiole.gpu_worker.speculation import Launched, NgramDrafter, NgramProposer, Price, SpeculationStats
from petiole.gpu_worker.speculation.ngram import SEARCHED
from petiole.gpu_worker.speculation.proposer import TRUST_AT_FIRST, agreeing, behind
from tests.support.toy_engine import VOCAB, BoldProposer, Expected, expected, request, toy_engine
from tests.support.toy_text import ToyConstraint

PRICE, LOW = 0.5, 0.4
CHEAP = Price(PRICE, 0.0)

CONSTRAINED = [
    request(
        [1 + i, 2, 3], 20, constraint=Constraint("regex", 6 + i), temperature=0.8 * (i % 2), request_id=f"c{i}"
    )
    for i in range(4)
]
FREE = [request([1 + i, 2], 20, ignore_eos=True, request_id=f"f{i}") for i in range(4)]
REPETITIVE = [
    request([1 + i, 4, 13, 40, 25, 28, 37], 40, ignore_eos=True, temperature=t, request_id=f"s{i}{t}")
    for i in range(3)
    for t in (0.0, 0.3)
]


@pytest.mark.parametrize("pipeline", ["on", "off"])
@pytest.mark.parametrize("drafts", [0, 4])
def test_mixed_batches_give_the_oracles_tokens(pipeline: str, drafts: int) -> None:
    requests = [r for pair in zip(CONSTRAINED, FREE, strict=True) for r in pair]
    with toy_engine(pipeline=pipeline, speculative_tokens=drafts) as engine:
        answers = [Expected.of(result) for result in engine.generate(requests)]
    assert answers == [expected(r) for r in requests]
    for r, answer in zip(requests, answers, strict=True):
        if r.constraint is not None:
            assert all(ToyConstraintReplay(answer.token_ids))


def ToyConstraintReplay(tokens: tuple[int, ...]) -> list[bool]:  # noqa: N802 - reads like the class it replays
    constraint = ToyConstraint(VOCAB, 99)
    return [constraint.consume(token) for token in tokens if token != 0]


def test_a_satisfied_constraint_ends_the_output() -> None:
    with toy_engine() as engine:
        result = engine.generate([request([1], 20, constraint=Constraint("regex", 3), ignore_eos=True)])[0]
    assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (
        3,
        FinishReason.STOP,
        "constraint",
    )


DIGITS = range(15, 25)
"""Of petiole-tiny, whose token 0 is an exclamation mark."""


@pytest.mark.parametrize(
    ("pattern", "sampling"),
    [
        ("[0-9]+", {"allowed_token_ids": [100]}),
        ("[0-9]+", {"banned_token_ids": DIGITS}),
        ("[0-9!]+", {"banned_token_ids": [0, *DIGITS]}),
        ("[0-9!]+", {"allowed_token_ids": [100]}),
        ("[0-9]+", {"banned_token_ids": DIGITS, "stop_token_ids": [0]}),
    ],
    ids=str,
)
def test_tokens_that_leave_nothing_of_a_constraint_are_the_requests_fault(
    pattern: str, sampling: dict[str, Any]
) -> None:
    bad = Request(
        prompt="x", constraint=Constraint("regex", pattern), sampling=SamplingParams(max_tokens=3, **sampling)
    )
    with Engine(EngineConfig(model="petiole-tiny", device="cpu", num_pages=4000)) as engine:
        with pytest.raises(InvalidRequest, match="constraint: must leave a token"):
            engine.generate([bad])
        assert engine.generate([Request(prompt="x", sampling=SamplingParams(max_tokens=3))])[0].token_ids


def test_a_bias_chooses_among_what_a_constraint_allows() -> None:
    against = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys(DIGITS, -1000.0))
    stopped = SamplingParams(max_tokens=3, banned_token_ids=list(DIGITS)[1:], stop_token_ids=[DIGITS[0]])
    with Engine(EngineConfig(model="petiole-tiny", device="cpu", num_pages=4000)) as engine:
        request = Request(prompt="x", constraint=Constraint("regex", "[0-9]{3}"), sampling=against)
        assert set(engine.generate([request])[0].token_ids) <= set(DIGITS)
        request = Request(prompt="x", constraint=Constraint("regex", "[0-9]{3}"), sampling=stopped)
        assert engine.generate([request])[0].token_ids == (DIGITS[0],)


def test_a_forward_runs_ahead_of_the_commit_that_its_mask_waits_for() -> None:
    """t+1 is launched while t is uncommitted; when its mask is computed, t has been committed."""
    with toy_engine() as engine:
        scheduler, loop = engine.scheduler, engine._loop
        in_flight_at_launch: list[int] = []
        holders_at_mask: list[int] = []
        launch, mask = scheduler.launch_forward_async, scheduler.compute_mask

        def watch_launch(plan: Any, slot_id: int) -> Any:
            in_flight_at_launch.append(loop.pipeline.in_flight)
            return launch(plan, slot_id)

        def watch_mask(handle: Any) -> Any:
            steps = [step for step in loop.pipeline.steps() if isinstance(step, PendingCommit)]
            held = {id(seq) for step in steps for seq in step.sequences if not seq.finalized}
            holders_at_mask.append(sum(id(seq) in held for seq in handle.sequences if seq.constraint))
            return mask(handle)

        scheduler.launch_forward_async = watch_launch  # type: ignore[method-assign]
        scheduler.compute_mask = watch_mask  # type: ignore[method-assign]
        engine.generate([request([1], 15, constraint=Constraint("regex", 15), ignore_eos=True)])
    assert max(in_flight_at_launch) == 1
    assert max(holders_at_mask) == 0


def test_free_requests_are_not_held_up_by_constraints_elsewhere() -> None:
    with toy_engine() as engine:
        loop, depth = engine._loop, []
        commit = engine.scheduler.commit_step

        def watch(step: Any) -> None:
            depth.append(loop.pipeline.in_flight)
            commit(step)

        engine.scheduler.commit_step = watch  # type: ignore[method-assign]
        engine.generate(FREE)
    assert max(depth) == 2


def test_resume_replays_the_constraint() -> None:
    whole = expected(CONSTRAINED[1])
    with toy_engine() as engine:
        for taken in range(1, len(whole.token_ids)):
            resumed = request(
                [2, 2, 3],
                20,
                constraint=Constraint("regex", 7),
                temperature=0.8,
                request_id="c1",
                resume_token_ids=whole.token_ids[:taken],
            )
            assert Expected.of(engine.generate([resumed])[0]) == whole


# ---------------------------------------------------------------- speculation


@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_speculation_gives_the_tokens_of_plain_decoding(drafts: int, pipeline: str) -> None:
    with toy_engine(speculative_tokens=drafts, pipeline=pipeline) as engine:
        answers = [Expected.of(result) for result in engine.generate(REPETITIVE)]
        stats = engine.stats()
    assert answers == [expected(r) for r in REPETITIVE]
    assert 0 < int(stats["accepted_draft_tokens"]) < int(stats["draft_tokens"])


def test_accepted_drafts_save_steps() -> None:
    class Oracle:
        """Knows the answer, and guesses wrong every fifth time."""

        def drafter(self, tokens: list[int]) -> Any:
            return Knowing(list(expected(REPETITIVE[0]).token_ids))

    class Knowing:
        def __init__(self, answer: list[int]) -> None:
            self.answer, self.at = answer, 0

        def extend(self, tokens: list[int], n_drafts: int = 0, n_held: int = 0) -> None:
            self.at += len(tokens)

        def worth(self, price: Price, *, in_flight: bool) -> int:
            return 8

        def rests(self, price: Price, *, in_flight: bool) -> int:
            return 0

        def expects(self, n: int) -> float:
            return 8

        def propose(self, count: int, launched: Launched | None = None) -> Sequence[int]:
            verified = () if launched is None else launched.drafts
            guesses = self.answer[self.at : self.at + count + 1 + len(verified)]
            guesses = [token if (self.at + i) % 5 else 0 for i, token in enumerate(guesses)]
            return guesses[:count] if launched is None else behind(verified, guesses, count)

    with toy_engine(speculative_tokens=4, proposer=Oracle()) as engine:
        assert Expected.of(engine.generate([REPETITIVE[0]])[0]) == expected(REPETITIVE[0])
        steps = int(engine.stats()["steps"])
    assert steps < 20, "40 tokens"


def test_drafts_stop_at_eos_stops_and_caps() -> None:
    requests = [
        request([1, 4, 13, 40, 25, 28, 37], n, stop_token_ids=[k], request_id=f"{n}.{k}")
        for n in (1, 2, 3, 90)
        for k in (0, 16, 25)
    ]
    with toy_engine(speculative_tokens=6) as engine:
        answers = [Expected.of(result) for result in engine.generate(requests)]
    assert answers == [expected(r) for r in requests]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_stop_sequence_may_begin_in_one_verification_and_end_in_another(n: int) -> None:
    free = request([1, 4, 13, 40, 25, 28, 37], 40, ignore_eos=True, request_id="free")
    answer = expected(free).token_ids
    stopped = [
        request(
            list(free.prompt or ()), 40, ignore_eos=True, stop_token_sequences=[answer[end - n : end], [end, end]],
            min_tokens=end % 3 * 4, request_id=f"{end}",
        )
        for end in range(n, len(answer))
    ]  # fmt: skip
    for drafts in (1, 6):
        with toy_engine(speculative_tokens=drafts) as engine:
            answers = [Expected.of(result) for result in engine.generate(stopped)]
            assert engine.stats()["accepted_draft_tokens"] > 0
        assert answers == [expected(r) for r in stopped]


def test_penalties_are_evaluated_for_each_draft_position() -> None:
    requests = [
        request([4, 13, 40, 25, 28, 37], 40, ignore_eos=True, frequency_penalty=f, request_id=str(f))
        for f in (0.2, 1.5, -0.5)
    ]
    with toy_engine(speculative_tokens=5) as engine:
        assert [Expected.of(r) for r in engine.generate(requests)] == [expected(r) for r in requests]
        assert engine.stats()["draft_tokens"]


def test_acceptance_is_logged_every_thousand_drafts(caplog: pytest.LogCaptureFixture) -> None:
    stats = SpeculationStats()
    with caplog.at_level(logging.INFO):
        for _ in range(499):
            stats.record(4, 3)
    assert [record.args for record in caplog.records] == [(1000, 750, 75.0, 4.0)]
    assert stats.acceptance_rate == 0.75
    stats.record(4, 1)
    assert (stats.accepted, stats.accepted_at) == (1498, [500, 499, 499])
    assert stats.mean_length == 1 + 1498 / 500


def proposed(
    drafter: NgramDrafter, count: int, price: float, launched: Launched | None = None
) -> Sequence[int] | None:
    """As many drafts as are worth this price."""
    return drafter.propose(min(count, worth(drafter, price)), launched)


def worth(drafter: NgramDrafter, price: float) -> int:
    return drafter.worth(Price(price, 0.0), in_flight=False)


@pytest.mark.parametrize(
    ("tokens", "count", "guess"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([7, 7, 7], 4, [7, 7, 7, 7]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, [8, 1]),
        ([5, 1, 2, 3, 9, 6, 2, 3, 8, 5, 1, 2, 3], 1, [9]),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
        ([], 3, []),
    ],
    ids=["repeat", "period", "run", "latest", "longest", "nothing", "short", "empty"],
)
def test_prompt_lookup(tokens: list[int], count: int, guess: list[int]) -> None:
    drafter = NgramProposer(2, 4).drafter(tokens)
    assert drafter.guess(count) == guess
    proposals = [proposed(drafter, count, PRICE) for _ in range(2)]
    assert proposals == [guess[: worth(drafter, PRICE)]] * 2, "changes nothing"


def read(drafter: NgramDrafter, text: Sequence[int], price: Price = CHEAP) -> int:
    """Decode a text with its drafts, as the scheduler does. Returns how many were verified."""
    at = n_drafts = 0
    while at < len(text):
        n = drafter.rests(price, in_flight=False)
        most = min(4, drafter.worth(price, in_flight=False), len(text) - at - 1)
        drafts = () if n else drafter.propose(most) or ()
        n = n or 1 + agreeing(drafts, text[at:])
        drafter.extend(text[at : at + n], len(drafts), n - 1 if drafts else 0)
        at, n_drafts = at + n, n_drafts + len(drafts)
    return n_drafts


def test_a_text_grows_with_the_sequence() -> None:
    at_once, bit_by_bit = NgramProposer().drafter([1, 2, 3, 1, 2, 3, 1]), NgramProposer().drafter([1, 2])
    for token in [3, 1, 2, 3, 1]:
        bit_by_bit.extend([token])
    assert at_once.guess(5) == bit_by_bit.guess(5) == [2, 3, 1, 2, 3]


@pytest.mark.parametrize("token", [0, 1, 255, 256, 0xD800, 0xFFFF, 0x10000, 151_935, 300_000])
def test_every_token_of_a_vocabulary_is_found_again(token: int) -> None:
    assert NgramProposer().drafter([token, 256, 1, 9, token, 256]).guess(2) == [1, 9]
    assert NgramProposer().drafter([7, 256, token, 7, 256]).guess(1) == [token]


def test_lookup_proposes_as_much_as_has_held_lately() -> None:
    drafter = NgramProposer().drafter([1, 2, 3])
    assert not proposed(drafter, 8, LOW)
    drafter.extend([1, 2])
    assert proposed(drafter, 8, LOW) == [3], "it is tried"
    assert not proposed(drafter, 8, PRICE), "where a draft costs more"
    assert read(drafter, [3, 1, 2] * 60) > 90
    assert proposed(drafter, 8, PRICE) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert not proposed(drafter, 8, 1)


def test_lookup_is_silent_where_text_does_not_repeat_itself_and_speaks_again_where_it_does() -> None:
    drafter = NgramProposer().drafter([1, 2, 0])
    changing = [token for last in range(3, 60) for token in (1, 2, last)]
    assert read(drafter, changing) < 20
    drafter.extend([1, 2])
    assert drafter.guess(1) == [59]
    assert not proposed(drafter, 4, PRICE)
    assert read(drafter, [7, 8] * 60) > 60
    assert proposed(drafter, 4, PRICE) == [7, 8, 7, 8]


@pytest.mark.parametrize("rest", [1, 2, 8, 16])
def test_lookup_rests_where_it_proposes_nothing_and_finds_what_repeats_itself_again(rest: int) -> None:
    price, new = Price(0.5, 0.0, rest), itertools.count(1000)
    drafter, rests = NgramProposer().drafter([]), list[int]()
    for _ in range(6):
        rests.append(drafter.rests(price, in_flight=False))
        drafter.extend([next(new) for _ in range(rests[-1])])
    assert rests == [min(rest, n) for n in (1, 3, 7, 15, 31, 63)]
    assert read(drafter, [5, 6, 7] * 50, price) > 30
    assert drafter.rests(price, in_flight=False) == 0


def test_new_text_is_not_tried_where_a_wrong_draft_makes_the_device_idle() -> None:
    """Two equal tokens now and then are no reason to wait. Guesses are free, and tell whether it would pay."""
    price, drafter = Price(0.25, 0.34), NgramProposer().drafter([7, 8, 9])
    for token in [token for last in range(100, 140) for token in (1, 2, last)]:
        drafter.guessed = drafter.guess(1)
        assert not (drafter.guessed and drafter.worth(price, in_flight=True))
        drafter.extend([token])


def test_lookup_rests_for_longer_where_a_look_takes_longer() -> None:
    price, drafter = Price(0.5, 0.0, 4), NgramProposer().drafter(range(3 * SEARCHED))
    assert [drafter.rests(price, in_flight=False) for _ in range(6)] == [1, 3, 7, 15, 16, 16]


def test_any_token_id_is_looked_up() -> None:
    largest = 2**24 - 1
    drafter = NgramProposer().drafter([largest, 5, 6, 7, largest, 5])
    assert drafter.guess(3)[:2] == [6, 7]


def test_lookup_is_silent_where_it_proposes_the_wrong_half_of_a_text_and_speaks_again() -> None:
    """Half of its guesses are right, but those that it proposes are not."""
    drafter = NgramProposer().drafter([1, 2, 3] * 40)
    assert worth(drafter, PRICE) > 0
    for _ in range(16):
        drafter.extend([9], n_drafts=2)
        drafter.guessed = drafter.guess(3)
        drafter.extend([1, 2, 3])
    assert worth(drafter, PRICE) == 0
    read(drafter, [1, 2, 3] * 60)
    assert worth(drafter, PRICE) > 0


def test_a_guess_of_a_rest_ends_with_the_first_wrong_token() -> None:
    """Those behind would have been drafts behind a wrong one."""
    found = list[float]()
    for text in ([1, 9, 3, 1], [1, 9, 9, 9], [1, 9]):
        drafter = NgramProposer().drafter([1, 2, 3])
        drafter.guessed = [1, 2, 3, 1]
        drafter.extend(text)
        found.append(drafter.trust)
    assert found[0] == found[1] == found[2] < TRUST_AT_FIRST


def test_a_lookup_that_must_wait_is_worth_nothing_where_waiting_costs_more() -> None:
    drafter = NgramProposer().drafter([1, 2, 3, 1, 2, 3])
    assert drafter.worth(Price(0.25, 0.1), in_flight=True) == worth(drafter, 0.25) > 0
    assert drafter.worth(Price(0.25, 0.9), in_flight=True) == 0
    assert drafter.worth(Price(0.25, 0.9), in_flight=False) > 0
    read(drafter, [1, 2, 3] * 100)
    assert drafter.worth(Price(0.25, 0.9), in_flight=True) > 4, "it is sure, and does not wait"


def test_drafts_behind_a_step_follow_what_it_is_expected_to_yield() -> None:
    drafter = BoldProposer().drafter([1, 2, 3, 1, 2, 3])
    assert proposed(drafter, 4, PRICE) == [1, 2, 3, 1]
    behind_drafts = {(): [2, 3, 1], (1, 2): [1, 2, 3], (1, 9): [3, 1, 2], (9,): [2, 3, 1], (1, 2, 3, 1): [3, 1, 2]}
    found = {drafts: proposed(drafter, 3, PRICE, Launched(drafts)) for drafts in behind_drafts}
    assert found == behind_drafts
    cautious = NgramProposer().drafter([1, 2, 3, 1, 2, 3])
    assert 0 < worth(cautious, LOW) < 3
    assert len(proposed(cautious, 3, LOW) or ()) == worth(cautious, LOW)
    assert proposed(cautious, 3, LOW, Launched((1, 2))) is None, "too much of what they follow is uncertain"
