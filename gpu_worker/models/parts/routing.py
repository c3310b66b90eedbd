"""Which experts each position takes, and how much each counts: pure functions of logits.

Equal scores: the expert with the lower number comes first, on every device. So a choice depends on the logits of
its position alone."""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.plan import Router

LEAST_SUM = 1e-20
"""Is added to a sum that divides."""


def route(plan: Router, logits: Tensor, correction: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 [T, experts] -> the chosen experts of each position in ascending order, int64 [T, chosen], and their
    weights, float32. correction, scales: float32 [experts]."""
    scores = _scores(plan, logits)
    chosen = _best(_candidates(plan, scores if correction is None else scores + correction), plan.chosen)
    chosen = chosen.sort(-1).values
    weights = scores.gather(-1, chosen)
    if plan.score == "chosen":
        weights = weights.softmax(-1)
    if plan.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    if plan.factor != 1.0:
        weights = weights * plan.factor
    return chosen, weights if scales is None else weights * scales[chosen]


def _scores(plan: Router, logits: Tensor) -> Tensor:
    if plan.score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if plan.score == "sigmoid" else logits


def _candidates(plan: Router, scores: Tensor) -> Tensor:
    """The scores, but those of experts outside the best groups, which are never chosen, are the lowest."""
    if plan.groups == 1 or plan.groups == plan.best_groups:
        return scores
    groups = scores.view(len(scores), plan.groups, -1)
    of_groups = groups.topk(min(plan.of_group, groups.shape[-1]), -1).values.sum(-1)
    best = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, _best(of_groups, plan.best_groups), True)
    return groups.masked_fill(~best[..., None], -torch.inf).flatten(-2)


def _best(scores: Tensor, n: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
