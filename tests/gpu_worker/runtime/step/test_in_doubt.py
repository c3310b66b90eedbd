"""Batches of rows in doubt, settled: for all numbers of drafts and of accepted ones, against a naive model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker.runtime.interface import (
    DRAFTED,
    NO_UPDATES,
    PENDING,
    KeptInput,
    ScoredTokens,
    StateUpdates,
    StepBatch,
)
from petiole.gpu_worker.runtime.step.in_doubt import RowsInDoubt, is_open
from petiole.gpu_worker.runtime.step.inputs import lay_out

START, N_ROWS = 30, 5
COUNTS = range(4)
NONE = np.empty(0, np.int32)


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def verification(row: int, start: int, drafts: int) -> StepBatch:
    tokens = array(PENDING, *range(100, 100 + drafts))
    return StepBatch(
        "verify", array(row), array(start), array(1 + drafts), tokens, array(1 + drafts), array(-1), (), NO_UPDATES
    )


def behind(drafts: int, own: int, token: int, **more: Any) -> StepBatch:
    """A decode of row 1, the step of row 2 in doubt, with its own drafts, and a chunk of row 3 behind it."""
    tokens = [PENDING, PENDING, *(token if token < 0 else token + k for k in range(own)), 7, 8, 9]
    return StepBatch(
        "mixed",
        array(1, 2, 3),
        array(12, START + 1 + drafts, 0),
        array(1, 1 + own, 3),
        array(*tokens),
        array(1, 1 + own, 0),
        array(-1, -1, -1),
        (),
        NO_UPDATES,
        in_doubt=array(0, drafts, 0),
        **more,
    )


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("token", [DRAFTED, 300])
def test_a_step_behind_a_verification_is_what_it_would_have_been_after_its_commit(
    token: int, repeats: bool
) -> None:
    pending = np.array([0, 41, 42, 43, 44])
    for drafts, own in itertools.product(range(1, 5), COUNTS):
        for accepted in range(1, drafts + 2):
            rows = RowsInDoubt(N_ROWS, 4, repeats=repeats)
            rows.drafts[2] = 300 + np.arange(4)
            sampled = array(*range(100, 99 + accepted), 42, *[0] * (drafts + 1 - accepted))
            rows.note(verification(2, START, drafts), sampled, array(accepted))
            states = StateUpdates(NONE, NONE, NONE, NONE, NONE, NONE, array(*([1] if own else [])), array())
            rotary = np.arange(1 + 1 + own + 3, dtype=np.int32)
            scored = ScoredTokens(array(3 + own), array(9), array(0, 0, 1), 0)
            kept = {"features": [KeptInput(5, 2 + own, 2)]}
            batch = behind(drafts, own, token, states=states, rotary=rotary, scored=scored, kept=kept)
            assert is_open(batch)

            found = rows.settled(batch, pending)

            back = repeats and accepted <= drafts
            again = list(range(100, 99 + accepted)) if back else []
            start = START + 1 if back else START + accepted
            known = [*again, 42] if again else [PENDING]
            inputs = [PENDING, *known, *range(300, 300 + own), 7, 8, 9]
            assert found.token_ids.tolist() == inputs, (drafts, own, accepted)
            assert found.starts.tolist() == [12, start, 0]
            assert found.lengths.tolist() == [1, len(again) + 1 + own, 3]
            end = start + len(again) + 1 + own
            assert end <= START + 2 + drafts + own, "no position beyond those that have pages"
            assert batch.earliest[1] <= start
            assert found.states.certain.tolist() == ([start + len(again) + 1] if own else [])
            assert found.rotary[1:-3].tolist() == list(range(start, end))
            assert [found.rotary[0], *found.rotary[-3:]] == [rotary[0], *rotary[-3:]]
            assert found.token_ids[found.scored.inputs].tolist() == [8]
            assert found.token_ids[found.kept["features"][0].at] == 7
            assert not is_open(found)
            positions = lay_out(found, np.zeros(3, np.int32)).positions
            assert positions.tolist() == [12, *range(start, end), 0, 1, 2]


def test_a_decode_becomes_longer_where_inputs_are_repeated() -> None:
    rows = RowsInDoubt(N_ROWS, 0, repeats=True)
    rows.note(verification(2, START, 3), array(100, 101, 5, 0), array(3))
    ones = array(1)
    batch = StepBatch(
        "decode", array(2), array(START + 4), ones, array(PENDING), ones, array(-1), (), NO_UPDATES,
        in_doubt=array(3),
    )  # fmt: skip
    found = rows.settled(batch, np.array([0, 0, 5, 0, 0]))
    assert (found.kind, found.token_ids.tolist(), found.starts.tolist()) == ("verify", [100, 101, 5], [START + 1])
    assert lay_out(found, array(0)).output_inputs.tolist() == [2]


def test_a_row_that_is_not_in_doubt_keeps_nothing_of_an_earlier_verification() -> None:
    rows = RowsInDoubt(N_ROWS, 0, repeats=True)
    rows.note(verification(2, START, 3), array(100, 101, 5, 0), array(3))
    batch = replace(behind(0, 1, 300), in_doubt=array(0, 0, 0))
    found = rows.settled(batch, np.zeros(5, np.int64))
    assert (found.token_ids.tolist(), found.starts.tolist()) == (batch.token_ids.tolist(), batch.starts.tolist())
    rows.note(verification(2, START, 2), array(100, 101, 5), array(3))
    found = rows.settled(behind(2, 1, 300), np.zeros(5, np.int64))
    assert (found.starts.tolist(), found.lengths.tolist()) == ([12, START + 3, 0], [1, 2, 3])
