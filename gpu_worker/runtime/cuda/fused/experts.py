"""Mixtures of experts without a wait for the device: see `models.parts.experts`, whose sums these are."""

from __future__ import annotations

from torch import Tensor

from petiole.gpu_worker.models.parts.feed_forward import activated
from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.plan import FeedForward
from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear, Linear
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout, KernelLinear
from petiole.gpu_worker.models.weights.stacked import StackedLinear
from petiole.gpu_worker.runtime.cuda.fused.linear.grouped import combined, gather_product, scatter_product
from petiole.gpu_worker.runtime.cuda.fused.routing import sort_pairs


def mix_experts(
    plan: FeedForward,
    up: StackedLinear,
    down: StackedLinear,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    taken: Tensor,
    kernels: Kernels,
) -> Tensor | None:
    """See `Kernels.mix_experts`."""
    first, second = _stored(up.whole), _stored(down.whole)
    if first is None or second is None:
        return None
    pairs = sort_pairs(chosen, taken)
    inner = activated(plan, gather_product(x, pairs, *first), kernels)
    return combined(scatter_product(inner, pairs, *second), pairs, shares)


def _stored(linear: Linear) -> tuple[Tensor | Coded, Tensor | None] | None:
    """A weight that `grouped` can read, and its bias. Weights in eight bits take inputs that are not rounded."""
    match linear:
        case DenseLinear(weight, bias) | KernelLinear(weight, bias):
            return weight, bias
        case Fp8Linear(weight, scale, _, bias):
            form = CodeLayout(weight.shape[0], weight.shape[1], weight.shape[1], codes=weight.dtype)
            return Coded(form, weight, scale.view(-1, 1)), bias
    return None
