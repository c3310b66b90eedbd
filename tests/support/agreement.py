"""Whether log-probabilities computed in bfloat16 are those of a model, up to what bfloat16 loses.

What it loses depends on the position: at most of them little, at a few ten times as much, where roundings tip a
balance. So rows are judged by how they are spread: the middle one against a position in the middle of those of
transformers, and the worst one against the worst.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch

from tests.gpu_worker.models.test_logits import reference, tokens

N_TOKENS = 240
MIDDLE, WORST = 2e-2, 5e-2
"""What is allowed anyhow, of a row's norm."""


def row_errors(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """[rows]: how far each row of [rows, vocab] is off, as a part of its norm."""
    return np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)


@functools.cache
def limits(model: Any) -> tuple[float, float]:
    """(for the middle row, for the worst): twice to three times what transformers loses when it computes a model,
    which is in float32 with weights that bfloat16 can hold, in bfloat16."""
    ids = tokens(N_TOKENS)
    lost = row_errors(reference(copy.deepcopy(model).to(torch.bfloat16), ids), reference(model, ids))
    return max(MIDDLE, 3 * float(np.median(lost))), max(WORST, 2 * float(lost.max()))


def agree(got: Any, expected: Any, model: Any) -> None:
    """Fails, in one line, if [rows, vocab] is not what the model says. Rows of NaN agree with nothing."""
    found = row_errors(np.asarray(got), np.asarray(expected))
    middle, worst = limits(model)
    if not (np.median(found) < middle and found.max() < worst):
        raise AssertionError(
            f"of {len(found)} rows the middle one is off by {np.median(found):.3g} (limit {middle:.3g}), the "
            f"worst, row {found.argmax()}, by {found.max():.3g} (limit {worst:.3g})"
        )


NEAR = 0.1
"""How far apart two candidates' log-probabilities may lie where either may be the likeliest."""


def same_but_for_near_ties(one: Any, other: Any) -> None:
    """Fails unless two greedy generations of a sequence agree: lists of a token and log-probabilities [vocab] for
    each step. They may part where two candidates are almost equally likely; what follows is not compared."""
    for step, ((token, row), (other_token, other_row)) in enumerate(zip(one, other, strict=True)):
        (error,) = row_errors(np.asarray(row)[None], np.asarray(other_row)[None])
        if not error < WORST:
            raise AssertionError(f"at step {step} log-probabilities are {error:.3g} apart (limit {WORST:.3g})")
        if token != other_token:
            gap = max(abs(float(r[token] - r[other_token])) for r in (row, other_row))
            if not gap < NEAR:
                raise AssertionError(f"at step {step} one has {token}, one {other_token}, {gap:.3g} apart")
            return
