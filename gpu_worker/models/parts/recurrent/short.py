"""A short convolution between two gates (`plan.ShortConvolution`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.states import RecurrentStep
from petiole.gpu_worker.models.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class ShortConvolutionWeights:
    """inputs: the outputs for b, c and x one after the other. convolution: [channels, kernel];
    convolution_bias: [channels]."""

    inputs: Linear
    convolution: Tensor
    convolution_bias: Tensor | None
    out: Linear

    @property
    def first(self) -> Linear:
        """The product of the layer's inputs."""
        return self.inputs


def short_convolution(weights: ShortConvolutionWeights, i: int, x: Tensor, step: RecurrentStep) -> Tensor:
    """Layer i: [T, hidden] -> [T, hidden]. Advances the states of the step's rows."""
    b, c, x = weights.inputs(x).chunk(3, dim=-1)
    mixed = step.convolve(i, b * x, weights.convolution, weights.convolution_bias)
    return weights.out(c * mixed.to(x.dtype))
