"""A gated delta net (`plan.DeltaNet`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.parts.recurrent.states import RecurrentStep
from petiole.gpu_worker.models.plan import DeltaNet
from petiole.gpu_worker.models.weights.linear import Linear

_EPS = 1e-6  # under the root of the length of queries and keys


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


def delta_net(
    plan: DeltaNet, weights: DeltaNetWeights, i: int, x: Tensor, step: RecurrentStep, kernels: Kernels
) -> Tensor:
    """Layer i: [T, hidden] -> [T, hidden]. Advances the states of the step's rows."""
    inputs, z, b, a = _projected(plan, weights, x)
    beta, g = b.float().sigmoid(), weights.fading * F.softplus(a.float() + weights.bias)
    q, k, v = _heads(plan, F.silu(step.convolve(i, inputs, weights.convolution)))
    outputs = step.apply_delta_rule(i, q, k, v, g, beta)
    gated = normed(plan.norm, weights.norm, outputs.to(x.dtype), kernels).float() * F.silu(z.float())
    return weights.out(gated.to(x.dtype).flatten(1))


def _projected(plan: DeltaNet, weights: DeltaNetWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The convolution's inputs [T, channels]; z [T, value_heads, value_dim]; b and a [T, value_heads]."""
    n, each = len(x), plan.value_heads // plan.key_heads
    projected, gates = weights.inputs(x), weights.gates(x)
    if not plan.grouped:
        inputs, z = torch.split(projected, [plan.channels, plan.value_size], dim=-1)
        b, a = gates.chunk(2, dim=-1)
        return inputs, z.view(n, plan.value_heads, plan.value_dim), b, a
    sizes = [plan.key_dim, plan.key_dim, each * plan.value_dim, each * plan.value_dim]
    q, k, v, z = torch.split(projected.view(n, plan.key_heads, -1), sizes, dim=-1)
    b, a = gates.view(n, plan.key_heads, 2 * each).chunk(2, dim=-1)
    inputs = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    return inputs, z.reshape(n, plan.value_heads, plan.value_dim), b.flatten(1), a.flatten(1)


def _heads(plan: DeltaNet, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [T, channels] -> queries and keys [T, key_heads, key_dim], values [T, value_heads, value_dim]."""
    q, k, v = torch.split(mixed, [plan.key_size, plan.key_size, plan.value_size], dim=-1)
    q, k = (_of_length_1(part.reshape(-1, plan.key_heads, plan.key_dim)) for part in (q, k))
    return q * plan.key_dim**-0.5, k, v.reshape(-1, plan.value_heads, plan.value_dim)


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
