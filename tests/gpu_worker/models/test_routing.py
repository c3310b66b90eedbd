"""Routers choose as a naive loop over positions and experts does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.models.parts.routing import route
from petiole.gpu_worker.models.plan import Router


@st.composite
def routers(draw: st.DrawFn) -> Router:
    groups = draw(st.sampled_from([1, 2, 3]))
    best = draw(st.integers(1, groups))
    experts = groups * draw(st.integers(1, 5))
    return Router(
        experts,
        chosen=draw(st.integers(1, experts // groups * best)),
        score=draw(st.sampled_from(["softmax", "chosen", "sigmoid"])),
        normalised=draw(st.booleans()),
        factor=draw(st.sampled_from([1.0, 2.5])),
        correction=draw(st.booleans()),
        groups=groups,
        best_groups=best,
        of_group=draw(st.integers(1, 2)),
        expert_scales=draw(st.booleans()),
    )


def naive(plan: Router, logits: Tensor, correction: Tensor, scales: Tensor) -> dict[int, float]:
    """{chosen expert: weight} of one position."""
    size = plan.experts // plan.groups
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "chosen": logits}[plan.score]
    by = scores + correction
    sums = [by[g * size : (g + 1) * size].sort().values[-plan.of_group :].sum() for g in range(plan.groups)]
    groups = sorted(range(plan.groups), key=lambda g: (-sums[g], g))[: plan.best_groups]
    candidates = [e for e in range(plan.experts) if e // size in groups]
    chosen = sorted(candidates, key=lambda e: (-by[e], e))[: plan.chosen]
    weights = {e: float(scores[e]) for e in chosen}
    if plan.score == "chosen":
        total = sum(math.exp(logits[e]) for e in chosen)
        weights = {e: math.exp(logits[e]) / total for e in chosen}
    total = sum(weights.values()) if plan.normalised else 1.0
    return {e: weight / total * plan.factor * float(scales[e]) for e, weight in weights.items()}


def drawn(n: int, experts: int, seed: int) -> Tensor:
    """Numbers on a coarse grid, so that many are equal."""
    return torch.randint(-8, 9, (n, experts), generator=torch.Generator().manual_seed(seed)) / 4


@settings(deadline=None, max_examples=150)
@given(routers(), st.integers(1, 6), st.integers(0, 2**16))
def test_a_choice_is_that_of_a_naive_loop(plan: Router, n: int, seed: int) -> None:
    logits = drawn(n, plan.experts, seed)
    correction = drawn(1, plan.experts, seed + 1)[0] if plan.correction else torch.zeros(plan.experts)
    scales = drawn(1, plan.experts, seed + 2)[0] if plan.expert_scales else torch.ones(plan.experts)
    given_correction = correction if plan.correction else None
    chosen, weights = route(plan, logits, given_correction, scales if plan.expert_scales else None)
    for i in range(n):
        expected = naive(plan, logits[i], correction, scales)
        assert chosen[i].tolist() == sorted(expected)
        assert weights[i].tolist() == pytest.approx([expected[e] for e in sorted(expected)], rel=1e-5, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(routers(), st.integers(2, 6), st.integers(0, 2**16))
def test_a_position_is_routed_alone_as_among_others(plan: Router, n: int, seed: int) -> None:
    logits = torch.randn(n, plan.experts, generator=torch.Generator().manual_seed(seed))
    correction = torch.randn(plan.experts) if plan.correction else None
    scales = torch.randn(plan.experts) if plan.expert_scales else None
    chosen, weights = route(plan, logits, correction, scales)
    for i in range(n):
        one, its = route(plan, logits[i : i + 1], correction, scales)
        assert torch.equal(one[0], chosen[i])
        assert torch.allclose(its[0], weights[i], rtol=1e-6)
