"""A layer's mixer that keeps a state, whichever it is."""

from __future__ import annotations

from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.delta_net import delta_net
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
