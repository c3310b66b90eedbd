"""Per-layer inputs: a second embedding, of which every layer adds a slice at its end (`plan.PerLayerInput`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.feed_forward import ACTIVATIONS
from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.plan import PerLayerInput
from petiole.gpu_worker.models.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """The weights of one layer. gate: hidden -> width; out: width -> hidden."""

    gate: Linear
    out: Linear
    norm: NormWeights


@dataclass(frozen=True, slots=True)
class PerLayerTables:
    """The tables of all layers. table: [vocab_size, layers * width]; projection: hidden -> layers * width."""

    table: Tensor
    projection: Linear
    norm: NormWeights


def per_layer_inputs(
    plan: PerLayerInput, tables: PerLayerTables, hidden: Tensor, token_ids: Tensor, kernels: Kernels
) -> Tensor:
    """The first layer's inputs [T, hidden], and the tokens [T] -> [T, layers, width]."""
    shape = (len(hidden), -1, plan.width)
    projected = (tables.projection(hidden) * plan.projection_factor).view(shape)
    projected = normed(plan.norm, tables.norm, projected, kernels)
    embedded = F.embedding(token_ids, tables.table).view(shape) * plan.embedding_factor
    return (embedded + projected) * plan.factor


def per_layer_output(
    plan: PerLayerInput, weights: PerLayerWeights, hidden: Tensor, given: Tensor, kernels: Kernels
) -> Tensor:
    """What a layer adds: its output [T, hidden] so far, and its slice [T, width] -> [T, hidden]."""
    gated = ACTIVATIONS[plan.activation](weights.gate(hidden)) * given
    return normed(plan.layer_norm, weights.norm, weights.out(gated), kernels)
