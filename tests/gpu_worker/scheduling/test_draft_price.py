"""The price of a draft is measured, and drafts are made where they bring more than they cost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from petiole.gpu_worker.scheduling.batching import StepPayload
from petiole.gpu_worker.scheduling.priorities.draft_price import LEAST, MEASURED, TRIED, TRIED_OF, DraftPrice
from petiole.gpu_worker.speculation import HeadDrafter, HeadProposer, Launched, Price
from petiole.gpu_worker.speculation.head import LONGEST_REST, OUTCOME, SHORTEST_REST
from petiole.gpu_worker.speculation.proposer import TRUST_AT_FIRST, held, worthwhile

CHEAP = Price(0.25, 0.0)


def payload(rows: int, drafts: int, at: float) -> StepPayload:
    lengths = np.full(rows, 1 + drafts)
    batch = SimpleNamespace(starts=np.full(rows, 50), outputs=lengths, lengths=lengths, size=rows)
    plan = SimpleNamespace(
        lengths=lengths if drafts else None,
        drafts=[[7] * drafts] * rows if drafts else None,
        n_chunks=0,
        sequences=[None] * rows,
    )
    return cast(Any, SimpleNamespace(batch=batch, plan=plan, launched_s=at))


def measured(step_s: float, position_s: float, idle_s: float = 0.0) -> DraftPrice:
    """Steps of 1 to 8 rows with 0 to 3 drafts each, on such a device. It idles before each with drafts."""
    price, now = DraftPrice(), 0.0
    for i in range(MEASURED * TRIED_OF + TRIED + 1):
        rows, drafts = 1 + i // MEASURED % 8, i // MEASURED % 4
        now += idle_s * (drafts > 0)
        step = payload(rows, drafts, now)
        now += step_s + position_s * rows * (1 + drafts)
        price.on_commit(step, now)
    return price


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_price_is_the_share_of_a_step_by_which_a_draft_for_each_row_lengthens_it(rows: int) -> None:
    price = measured(0.008, 0.001).of(rows).draft
    assert price == pytest.approx(max(LEAST, rows / (8 + rows)), rel=0.05)


def test_where_positions_cost_nothing_a_draft_costs_the_least() -> None:
    assert measured(0.007, 0.0).of(64).draft == LEAST


def test_a_sequence_alone_waits_as_long_as_the_device_idles() -> None:
    assert measured(0.008, 0.001, idle_s=0.003).of(1).wait == pytest.approx(3 / 9, rel=0.05)
    assert measured(0.008, 0.001).of(1).wait == 0


def test_a_sequence_that_waits_misses_a_step_of_the_others() -> None:
    """It costs a token, less what the others' step saves."""
    assert measured(0.008, 0.001, idle_s=0.003).of(8).wait == pytest.approx(1 - 8 / 16, rel=0.05)
    assert measured(0.0, 0.001).of(8).wait == pytest.approx(0, abs=0.05)


def test_it_pays_to_wait_for_drafts_that_bring_more_than_they_cost() -> None:
    price = Price(draft=0.25, wait=0.5)
    assert price.pays(held(0.9, 2), 2)
    assert not price.pays(held(0.6, 2), 2)
    assert Price(draft=0.25, wait=0.2).pays(held(0.6, 2), 2)


@pytest.mark.parametrize(
    ("step_s", "position_s", "rows", "rest"),
    [
        (0.03, 0.0, 1, 1),
        (0.0005, 0.00007, 1, 8),
        (0.0005, 0.00007, 8, 16),
        (0.007, 0.0, 16, 10),
        (0.0, 1e-5, 64, 16),
    ],
)
def test_looks_for_drafts_cost_half_a_hundredth_of_the_steps(
    step_s: float, position_s: float, rows: int, rest: int
) -> None:
    assert measured(step_s, position_s).of(rows).rest == rest
    assert DraftPrice().of(rows).rest == 1, "nothing is known yet"


def test_drafts_are_tried_again_where_they_were_too_dear() -> None:
    price, now, prices = measured(0.0, 0.001), 100.0, []
    for _ in range(TRIED_OF):
        prices.append(price.of(4).draft)
        price.on_commit(payload(4, 0, now), now + 0.004)
        now += 0.004
    assert prices.count(LEAST) == TRIED
    assert np.median(prices) > 0.9


def test_drafts_are_worth_it_as_long_as_they_hold_more_often_than_they_cost() -> None:
    for trust in (0.1, 0.5, 0.7, 0.9, 0.99, 1.0):
        for price in (0.1, 0.25, 0.5, 0.9, 1.0, 1.5):
            n = worthwhile(trust, price)
            assert n == 0 or trust**n >= price
            assert trust == 1.0 or trust ** (n + 1) <= price


def test_a_head_drafts_as_many_tokens_as_its_last_ones_let_expect() -> None:
    drafter = HeadDrafter([-3] * 4)
    assert drafter.wanted(4, Price(0.25, 0.0), waits=False) == worthwhile(TRUST_AT_FIRST, 0.25) == 2
    for _ in range(40):
        drafter.offer([1, 2, 3])
        drafter.extend([1, 2, 3, 4])
    assert drafter.wanted(4, Price(0.25, 0.0), waits=False) == 4
    assert drafter.propose(4) == ()
    assert drafter.propose(4, Launched((), made=3)) == [-3] * 3
    drafter.offer([5, 6, 7, 8])
    assert drafter.propose(3) == [5, 6, 7]
    assert drafter.worth(Price(1.0, 0.0), in_flight=True) == 0


def decode(
    drafter: HeadDrafter, is_right: Callable[[int], bool], n: int, price: Price = CHEAP, *, waits: bool = False
) -> list[int]:
    """How many tokens are drafted behind each of n steps of one token, two of which are in flight. Token t is
    t + 1; a draft of it is right or 0."""
    made, known, due = list[int](), 0, 0
    for step in range(n):
        committed = max(0, step - 1)  # the step before is in flight
        made.append(drafter.wanted(4, price, waits=waits) if committed >= due else 0)
        if step and (committed := step) >= due:
            drafter.extend(range(known + 1, committed + 1))
            known = committed
            behind = range(committed, committed + made[step - 1])
            if behind:
                drafter.offer([t + 1 if is_right(t) else 0 for t in behind])
            due = committed + drafter.rests(price, in_flight=True)
    return made


def never(token: int) -> bool:
    return False


def always(token: int) -> bool:
    return True


def test_a_head_of_which_nothing_holds_rests_each_time_twice_as_long_and_is_tried_behind_each_rest() -> None:
    made = decode(HeadDrafter(), never, 2000)
    apart = np.diff(np.flatnonzero(made))
    resting = apart[apart > 1][1:] - OUTCOME
    doubled = [SHORTEST_REST * 2**n for n in range(1, 20) if SHORTEST_REST * 2**n < LONGEST_REST]
    assert resting[: len(doubled)].tolist() == doubled
    assert set(resting[len(doubled) :].tolist()) == {LONGEST_REST}
    assert set(made[100:]) == {0, 1}


def test_a_head_that_is_right_again_drafts_again() -> None:
    since, within = 1000, 3 * LONGEST_REST
    made = decode(HeadDrafter(), lambda token: token >= since, since + within + 100)
    assert max(made[100:since]) == 1
    assert made[since + within :] == [4] * 100


def test_a_head_rests_where_no_draft_is_worth_it_whatever_holds() -> None:
    drafter = HeadDrafter()
    assert not any(decode(drafter, always, 200, Price(1.0, 0.0)))


def test_a_head_whose_sequence_waits_is_tried_as_well() -> None:
    """As behind a constraint. A wait does not pay while little is expected, and trying costs none."""
    price = Price(0.25, 0.5)
    assert [HeadDrafter().wanted(4, price, waits=waits) for waits in (False, True)] == [2, 0]
    made = decode(HeadDrafter(), always, 200, price, waits=True)
    assert made[:SHORTEST_REST] == [0] * SHORTEST_REST
    assert made[-1] == 4


def test_a_rest_goes_on_while_a_verification_before_it_ends() -> None:
    drafter = HeadDrafter()
    drafter.extend([1] * OUTCOME)
    rest = drafter.rests(CHEAP, in_flight=True)
    drafter.extend([1, 1], n_drafts=2, n_held=1)
    assert drafter.rests(CHEAP, in_flight=False) == rest - 2 > 0


def test_a_sequence_begins_with_the_experience_of_those_before() -> None:
    proposer, trusts = HeadProposer(), list[float]()
    for is_right in [never] * 8 + [always] * 8:
        drafter = proposer.drafter([])
        trusts.append(drafter.trust)
        decode(drafter, is_right, 200)
    assert trusts[0] == TRUST_AT_FIRST == HeadProposer().drafter([]).trust, "of each engine alone"
    assert trusts[8] < CHEAP.draft < TRUST_AT_FIRST < trusts[-1]
