"""Feed-forward layers: what stands between their two products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.plan import Activation, FeedForward
from petiole.gpu_worker.models.weights.linear import Linear

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """gate_up: the outputs of the gate, then those of up; of up alone if the plan has no gate."""

    gate_up: Linear
    down: Linear


def activated(plan: FeedForward, gate_up: Tensor, kernels: Kernels) -> Tensor:
    """[T, gate and up] -> [T, inner]."""
    if not plan.gated:
        return _active(plan, _clamped(plan, gate_up))
    if plan.activation == "silu" and not plan.clamp and plan.slope == 1.0 and not plan.up_offset:
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=plan.clamp) if plan.clamp else gate
    return _active(plan, gate) * (_clamped(plan, up) + plan.up_offset)


def _active(plan: FeedForward, x: Tensor) -> Tensor:
    return ACTIVATIONS[plan.activation](x) if plan.slope == 1.0 else x * torch.sigmoid(plan.slope * x)


def _clamped(plan: FeedForward, up: Tensor) -> Tensor:
    return up.clamp(-plan.clamp, plan.clamp) if plan.clamp else up
