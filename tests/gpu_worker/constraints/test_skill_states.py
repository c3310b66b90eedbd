"""A skill steers the output through the same protocol as a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest

from petiole.gpu_worker.constraints import ConstraintState, SkillConstraint, fill_masks

POINT, COORD, MORE, EOS = 5, 40, 41, 1
VOCAB = 70


@dataclass
class Points:
    """POINT, then x and y as values beside two COORD tokens, then MORE or the end."""

    values: list[float] = field(default_factory=list)
    state: str = "open"

    def allowed_token_ids(self) -> Sequence[int] | None:
        return {"open": [POINT], "x": [COORD], "y": [COORD], "next": [MORE, EOS], "end": [EOS], "free": None}[
            self.state
        ]

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> None:
        after = {"open": "x", "x": "y", "y": "next", "next": "open" if token_id == MORE else "end", "end": "end"}
        self.values.extend(values)
        self.state = after[self.state]

    def finalize(self) -> Any:
        return {"points": [{"x": x, "y": y} for x, y in zip(self.values[::2], self.values[1::2], strict=True)]}

    def fork(self) -> Self:
        return type(self)(list(self.values), self.state)


def constraint(state: str = "open") -> SkillConstraint:
    return SkillConstraint(Points(state=state), [EOS], VOCAB)


def allowed(state: ConstraintState) -> list[int]:
    mask = np.full(4, -1, np.int32)
    state.fill_mask(mask)
    return [v for v in range(128) if int(mask[v // 32]) >> (v % 32) & 1]


def test_a_skill_walks_to_its_answer() -> None:
    state = constraint()
    assert state.consume(POINT)
    assert state.consume(COORD, [0.25])
    assert state.consume(COORD, [0.5])
    assert allowed(state) == [EOS, MORE]
    assert not state.finished
    assert state.consume(EOS)
    assert state.finished
    assert state.finalize() == {"points": [{"x": 0.25, "y": 0.5}]}


def test_a_token_that_the_skill_does_not_allow_changes_nothing() -> None:
    state = constraint()
    assert not state.consume(COORD, [0.1])
    assert allowed(state) == [POINT]


def test_a_free_step_allows_the_whole_vocabulary_and_no_padding() -> None:
    assert allowed(constraint("free")) == list(range(VOCAB))


def test_going_back_takes_the_values_along() -> None:
    state = constraint()
    for token_id, values in [(POINT, []), (COORD, [0.25]), (COORD, [0.5]), (MORE, []), (POINT, [])]:
        assert state.consume(token_id, values)
    state.rollback(3)
    assert allowed(state) == [COORD]
    state.consume(COORD, [0.75])
    assert state.finalize() == {"points": [{"x": 0.25, "y": 0.75}]}
    state.rollback(3)
    assert allowed(state) == [POINT]
    with pytest.raises(AssertionError):
        state.rollback(1)


def test_a_fork_goes_its_own_way_and_back() -> None:
    state = constraint()
    state.consume(POINT)
    fork = state.fork()
    fork.consume(COORD, [0.5])
    fork.rollback(2)
    assert (allowed(fork), allowed(state)) == ([POINT], [COORD])


def test_skills_and_grammars_fill_one_array() -> None:
    masks = np.full((2, 4), -1, np.int32)
    fill_masks([constraint(), constraint("free")], masks)
    assert masks[0].tolist() == [1 << POINT, 0, 0, 0]
    assert masks[1].tolist() == [-1, -1, (1 << VOCAB - 64) - 1, 0]
