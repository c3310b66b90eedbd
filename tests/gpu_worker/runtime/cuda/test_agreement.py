"""What the GPU tests take for the same log-probabilities: those of bfloat16, not those of a wrong key."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.gpu_worker.models.test_logits import reference, tokens
from tests.support.agreement import agree, same_but_for_near_ties
from tests.support.families import FAMILIES, MIXTURES, build_model

NO_HEAD_SIZE_OF_ITS_OWN = {"phi4-mini"}
"""transformers checks this model's rotary factors against hidden size / heads alone."""
# And of mixtures, rounding may turn the choice of an expert.


@pytest.fixture(params=sorted(FAMILIES.keys() - NO_HEAD_SIZE_OF_ITS_OWN - MIXTURES))
def model(request):
    """In float32, with weights that bfloat16 can hold, and the head size that the GPU tests have."""
    return build_model(request.param, head_dim=64).to(torch.bfloat16).float()


def last_rows(model, prompts):
    return np.array([reference(model, prompt)[-1] for prompt in prompts])


def test_bfloat16_agrees_however_few_the_positions_and_a_wrong_key_does_not(model):
    prompts = [tokens(30 + seed, seed) for seed in range(10)]
    expected = last_rows(model, prompts)
    rounded = last_rows(copy.deepcopy(model).to(torch.bfloat16), prompts)
    for n in (3, 5, 10):
        for first in range(0, 10 - n + 1, n):
            agree(rounded[first : first + n], expected[first : first + n], model)
    wrong = last_rows(model, [[*p[:-4], 3 + (p[-4] + 50) % 300, *p[-3:]] for p in prompts])
    with pytest.raises(AssertionError, match=r"^of 10 rows the middle one is off by .*\)$"):
        agree(wrong, expected, model)


def test_rows_that_are_no_numbers_agree_with_nothing():
    model = build_model("qwen3", head_dim=64)
    expected = reference(model, tokens(5))
    got = expected.copy()
    got[3] = np.nan
    with pytest.raises(AssertionError, match="worst, row 3"):
        agree(got, expected, model)


def test_generations_may_part_where_two_candidates_are_almost_equal():
    near, far = np.log([0.5, 0.48, 0.02]), np.log([0.7, 0.28, 0.02])
    one = [(2, far), (0, near), (0, far)]
    same_but_for_near_ties(one, [(2, far), (1, near[[1, 0, 2]]), (2, far * 9)])
    same_but_for_near_ties(one, one)
    with pytest.raises(AssertionError, match="at step 2 one has 0, one 1"):
        same_but_for_near_ties(one, [*one[:2], (1, far)])
    with pytest.raises(AssertionError, match="at step 0 log-probabilities"):
        same_but_for_near_ties(one, [(2, near), *one[1:]])
