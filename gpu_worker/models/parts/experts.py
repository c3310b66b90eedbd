"""Mixtures of experts: feed-forwards of one size, of which each position takes a few.

Pairs of a position and an expert are sorted by expert, so that each expert that somebody chose computes its
positions in one go. The outputs of a position are added in the order of its experts, in float32: what a position
gets does not depend on the others of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.feed_forward import activated
from petiole.gpu_worker.models.parts.kernels import Kernels, rms_norm
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import Experts, Router
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.models.weights.stacked import StackedLinear


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """logits: never quantised while loading. correction, expert_scales: float32 [experts]. scale: float32
    [hidden], of the stream where the router reads it."""

    logits: DenseLinear
    correction: Tensor | None = None
    scale: Tensor | None = None
    expert_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate_up, down: of all experts. taken: int64 [experts], how many positions each of them has computed.
    dense_gate: hidden -> 1, never quantised."""

    router: RouterWeights
    gate_up: StackedLinear
    down: StackedLinear
    taken: Tensor
    norm: NormWeights | None = None
    out_norm: NormWeights | None = None
    dense_out_norm: NormWeights | None = None
    dense_gate: DenseLinear | None = None


def routed(
    plan: Router, weights: RouterWeights, x: Tensor, real: Tensor | None, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """The router's inputs [T, hidden] -> experts and weights, as in `Kernels.choose_experts`. In float32 whatever
    the model's type, because a choice that rounding turns changes all that follows."""
    if plan.of_stream:
        scale = x.shape[-1] ** -0.5
        x = rms_norm(x.float(), None, plan.eps)
        x = x * scale if weights.scale is None else x * weights.scale * scale
    logits = kernels.multiply_wide(x, weights.logits.weight, weights.logits.bias)
    return kernels.choose_experts(plan, logits, weights.correction, weights.expert_scales, real)


def mixed_experts(
    plan: Experts, weights: ExpertWeights, x: Tensor, chosen: Tensor, counts: Tensor, kernels: Kernels
) -> Tensor:
    """Inputs [T, hidden], and what `routed` says of them -> weighted sums of the experts' outputs, [T, hidden]."""
    found = kernels.mix_experts(plan.each, weights.gate_up, weights.down, x, chosen, counts, weights.taken)
    if found is not None:
        return found
    taken = torch.bincount(chosen.flatten(), minlength=plan.router.experts)[: plan.router.experts]
    weights.taken.add_(taken)
    order = chosen.flatten().argsort(stable=True)
    positions, shares = order // chosen.shape[1], counts.flatten()[order, None]
    sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    at = 0
    for expert, n in enumerate(taken.tolist()):
        if n:
            mine = positions[at : at + n]
            inner = activated(plan.each, weights.gate_up[expert](x[mine]), kernels)
            sums.index_add_(0, mine, weights.down[expert](inner).float() * shares[at : at + n])
            at += n
    return sums.to(x.dtype)
