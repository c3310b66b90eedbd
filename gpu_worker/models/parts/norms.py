"""Norms of all kinds."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels, rms_norm
from petiole.gpu_worker.models.plan import Norm


@dataclass(frozen=True, slots=True)
class NormWeights:
    """In the model's type; float32 if the plan's norm has an offset, which is in the weight already."""

    weight: Tensor | None = None
    bias: Tensor | None = None


def normed(norm: Norm, weights: NormWeights, x: Tensor, kernels: Kernels) -> Tensor:
    """Over the last dimension, in the type of x."""
    if norm.kind == "layer":
        if weights.weight is None or weights.weight.dtype == x.dtype:
            return F.layer_norm(x, x.shape[-1:], weights.weight, weights.bias, norm.eps)
        weight, bias = (None if one is None else one.float() for one in (weights.weight, weights.bias))
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, norm.eps).to(x.dtype)
    y = rms_norm(x, None, norm.eps) if weights.weight is None else kernels.rms_norm(x, weights.weight, norm.eps)
    return y if weights.bias is None else y + weights.bias


def weight_of(weights: NormWeights | None) -> Tensor:
    """The weight of a norm that is plain."""
    assert weights is not None
    assert weights.weight is not None
    return weights.weight


def is_plain(norm: Norm | None, weights: NormWeights | None) -> bool:
    """An RMS norm that kernels compute: with a weight, and nothing else."""
    return norm is not None and weights is not None and norm.kind == "rms" and norm.weight and not norm.bias
