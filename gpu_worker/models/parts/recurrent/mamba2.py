"""A mixer of Mamba-2 (`plan.Mamba2`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import rms_norm
from petiole.gpu_worker.models.parts.norms import NormWeights, is_plain, weight_of
from petiole.gpu_worker.models.parts.recurrent.states import RecurrentStep
from petiole.gpu_worker.models.plan import Mamba2
from petiole.gpu_worker.models.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """inputs: the outputs for z, the convolution's inputs and the steps one after the other. convolution:
    [channels, kernel]; convolution_bias: [channels]. fading: float32 [heads], -exp(decay); bias, skip: float32
    [heads]."""

    inputs: Linear
    convolution: Tensor
    convolution_bias: Tensor | None
    fading: Tensor
    bias: Tensor
    skip: Tensor
    norm: NormWeights
    out: Linear

    @property
    def first(self) -> Linear:
        """The product of the layer's inputs."""
        return self.inputs


def mamba2(plan: Mamba2, weights: Mamba2Weights, i: int, x: Tensor, step: RecurrentStep) -> Tensor:
    """Layer i: [T, hidden] -> [T, hidden]. Advances the states of the step's rows."""
    assert is_plain(plan.norm, weights.norm)
    z, inputs, steps = torch.split(weights.inputs(x), [plan.inner, plan.channels, plan.heads], dim=-1)
    mixed = F.silu(step.convolve(i, inputs, weights.convolution, weights.convolution_bias))
    value, key, query = torch.split(mixed, [plan.inner, plan.group_size, plan.group_size], dim=-1)
    k, q = (part.reshape(-1, plan.groups, plan.state) for part in (key, query))
    v = value.reshape(-1, plan.heads, plan.head_dim)
    times = F.softplus(steps.float() + weights.bias)
    outputs = step.scan(i, q, k, v * times[..., None], weights.fading * times)
    outputs = outputs + v * weights.skip[:, None]
    gated = (outputs.flatten(1) * F.silu(z.float())).view(-1, plan.groups, plan.inner // plan.groups)
    normed = rms_norm(gated, None, plan.norm.eps).flatten(1) * weight_of(weights.norm).float()
    return weights.out(normed.to(x.dtype))
