"""A layer's mixer that keeps a state, whichever it is; and that of a gated delta net (`plan.DeltaNet`)."""

from __future__ import annotations

from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import is_plain, weight_of
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights, part_of
from petiole.gpu_worker.models.parts.recurrent.mamba2 import Mamba2Weights, mamba2
from petiole.gpu_worker.models.parts.recurrent.short import ShortConvolutionWeights, short_convolution
from petiole.gpu_worker.models.parts.recurrent.states import RecurrentStep
from petiole.gpu_worker.models.plan import DeltaNet, Mamba2, Recurrent

RecurrentWeights = DeltaNetWeights | Mamba2Weights | ShortConvolutionWeights


def recurrent(
    plan: Recurrent, weights: RecurrentWeights, i: int, x: Tensor, step: RecurrentStep, kernels: Kernels
) -> Tensor:
    """Layer i's mixer: [T, hidden] -> [T, hidden]."""
    if isinstance(plan, DeltaNet):
        assert isinstance(weights, DeltaNetWeights)
        return delta_net(plan, weights, i, x, step, kernels)
    if isinstance(plan, Mamba2):
        assert isinstance(weights, Mamba2Weights)
        return mamba2(plan, weights, i, x, step)
    assert isinstance(weights, ShortConvolutionWeights)
    return short_convolution(weights, i, x, step)


def delta_net(
    plan: DeltaNet, weights: DeltaNetWeights, i: int, x: Tensor, step: RecurrentStep, kernels: Kernels
) -> Tensor:
    """Layer i: [T, hidden] -> [T, hidden]. Advances the states of the step's rows."""
    assert is_plain(plan.norm, weights.norm)
    projected = weights.inputs(x)
    outputs = step.apply_delta_rule(i, plan, weights, projected, weights.gates(x))
    z = part_of(projected, plan.parts["z"], plan.key_heads)
    gated = kernels.gated_rms_norm(outputs, z, weight_of(weights.norm), plan.norm.eps)
    return weights.out(gated.flatten(1))
