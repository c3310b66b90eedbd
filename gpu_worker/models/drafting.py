"""A head that drafts: from what the model makes of a token, and the token after it, the token after that.

    t_p  ──► layers of the model ──► h_p ──norm──┐
    t_p+1 ──► embedding ────────────────norm──┴─ join ──► one layer ──► norm ──► d_p ──► head ──► logits of t_p+2

h_p is behind the model's last norm. The layer's keys and values of position p lie where the model's do. A chain of
drafts goes on with d_p in the place of h_p+1.

The head of Qwen3.5, as its checkpoints store it (`mtp.*`). Embedding and output head are the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.plan import Norm
from petiole.gpu_worker.models.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class DraftingWeights:
    """join: 2 * hidden -> hidden, of the token and what is known before it. norm: behind the layer. table: of its
    rotation."""

    layer: LayerWeights
    join: Linear
    token_norm: NormWeights
    hidden_norm: NormWeights
    norm: NormWeights
    table: Tensor | None

    def joined(self, plan: Norm, embedded: Tensor, known: Tensor, kernels: Kernels) -> Tensor:
        """The inputs of the layer, [T, hidden]. embedded: the tokens after the positions, [T, hidden]; known: what
        the model has made of the positions, behind its last norm, [T, hidden]."""
        token = normed(plan, self.token_norm, embedded, kernels)
        before = normed(plan, self.hidden_norm, known, kernels)
        return self.join(torch.cat([token, before], dim=-1))
