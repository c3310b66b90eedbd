"""The weights of a gated delta net (`plan.DeltaNet`), and what its projections and its convolution give the delta
rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import DeltaNet, HeadPart
from petiole.gpu_worker.models.weights.linear import Linear

EPS = 1e-6
"""Under the root of the length of queries and keys."""


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """inputs, gates: `DeltaNet.input_sizes` and `gate_sizes`; gates are never quantised while loading.
    convolution: [channels, kernel]. fading: float32 [value_heads], -exp(decay); bias: float32 [value_heads]."""

    inputs: Linear
    gates: Linear
    convolution: Tensor
    fading: Tensor
    bias: Tensor
    norm: NormWeights
    out: Linear

    @property
    def first(self) -> Linear:
        """The product of the layer's inputs."""
        return self.inputs


def part_of(projected: Tensor, part: HeadPart, key_heads: int) -> Tensor:
    """[T, outputs of a projection] -> its view [T, key_heads, part.size]."""
    return projected[:, part.first :].unfold(-1, part.size, part.apart)[:, :key_heads]


def convolution_inputs(plan: DeltaNet, projected: Tensor) -> Tensor:
    """[T, outputs of the projection of the inputs] -> [T, channels]."""
    parts = (plan.parts[name] for name in plan.convolved)
    return torch.cat([part_of(projected, part, plan.key_heads).flatten(1) for part in parts], dim=-1)


def rule_heads(plan: DeltaNet, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From what the convolution gives, float32 [T, channels]: queries and keys [T, key_heads, key_dim], values [T,
    value_heads, value_dim]."""
    q, k, v = torch.split(F.silu(mixed), [plan.key_size, plan.key_size, plan.value_size], dim=-1)
    q, k = (_of_length_1(part.reshape(-1, plan.key_heads, plan.key_dim)) for part in (q, k))
    return q * plan.key_dim**-0.5, k, v.reshape(-1, plan.value_heads, plan.value_dim)


def rule_gates(plan: DeltaNet, weights: DeltaNetWeights, gates: Tensor) -> tuple[Tensor, Tensor]:
    """From the outputs of the projection of the gates: g and beta, float32 [T, value_heads]."""
    b, a = (part_of(gates, plan.parts[name], plan.key_heads).flatten(1).float() for name in ("b", "a"))
    return weights.fading * F.softplus(a + weights.bias), b.sigmoid()


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
