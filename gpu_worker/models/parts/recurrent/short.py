"""A short convolution between two gates (`plan.ShortConvolution`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.convolution import convolved
from petiole.gpu_worker.models.parts.recurrent.states import LayerState, RecurrentStep
from petiole.gpu_worker.models.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class ShortConvolutionWeights:
    """inputs: the outputs for b, c and x one after the other. convolution: [channels, kernel]; bias:
    [channels]."""

    inputs: Linear
    convolution: Tensor
    bias: Tensor | None
    out: Linear

    @property
    def first(self) -> Linear:
        """The product of the layer's inputs."""
        return self.inputs


def short_convolution(
    weights: ShortConvolutionWeights, x: Tensor, state: LayerState, step: RecurrentStep
) -> Tensor:
    """[T, hidden] -> [T, hidden]. Advances the states of the step's rows."""
    b, c, x = weights.inputs(x).chunk(3, dim=-1)
    inputs, outputs = b * x, torch.empty_like(x)
    for span in step.spans:
        step.progress()
        mixed, before = convolved(inputs[span.at], state.inputs[span.places], weights.convolution, weights.bias)
        outputs[span.at] = mixed.to(x.dtype)
        state.put(span, before)
    return weights.out(c * outputs)
