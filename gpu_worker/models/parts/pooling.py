"""From the hidden states of a text to its vector: `plan.Pooling`, in float32 whatever the model's type.

BGE-M3 also makes something of each token: a weight for a search by words (sparse), relu of a product; and a vector
of length 1 (ColBERT), of all tokens but the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.plan import Pooling

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """float32: weight [outputs, inputs], bias [outputs]."""

    weight: Tensor
    bias: Tensor | None = None
    norm: NormWeights | None = None


@dataclass(frozen=True, slots=True)
class Pooler:
    """A pooling with its weights."""

    plan: Pooling
    denses: tuple[DenseWeights, ...]
    sparse: DenseWeights | None = None
    colbert: DenseWeights | None = None

    def pooled(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T, hidden], all positions of texts of these lengths, after the last norm -> float32 [texts, hidden]. A
        text's sum runs over its own positions alone, so it has the same bits in any batch."""
        rows, at = [], 0
        for n in lengths:
            own = hidden[at : at + n].float()
            rows.append(own.mean(0) if self.plan.kind == "mean" else own[0 if self.plan.kind == "first" else -1])
            at += n
        return torch.stack(rows)

    def vectors(self, pooled: Tensor, kernels: Kernels) -> Tensor:
        """[texts, hidden] -> float32 [texts, vector_size]. Row by row, so that bits do not depend on how many
        there are."""
        rows = pooled.float()
        if not self.denses:
            return rows
        return torch.cat([self._dense(row[None], kernels) for row in rows]) if len(rows) else rows

    def token_weights(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden], of one text, after the last norm -> float32 [tokens]."""
        assert self.sparse is not None, "the caller has checked that the model has the product"
        return F.relu(F.linear(hidden.float(), self.sparse.weight, self.sparse.bias)).squeeze(-1)

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden], of one text, after the last norm -> float32 [tokens - 1, numbers]."""
        assert self.colbert is not None, "the caller has checked that the model has the product"
        return F.normalize(F.linear(hidden[1:].float(), self.colbert.weight, self.colbert.bias), dim=-1)

    def _dense(self, x: Tensor, kernels: Kernels) -> Tensor:
        for plan, weights in zip(self.plan.denses, self.denses, strict=True):
            x = F.linear(x, weights.weight, weights.bias)
            if plan.activation != "none":
                x = _ACTIVATIONS[plan.activation](x)
            if plan.norm is not None and weights.norm is not None:
                x = normed(plan.norm, weights.norm, x, kernels)
        return x
