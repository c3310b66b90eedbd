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
from petiole.gpu_worker.models.plan import Pooling, PoolingKind

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu, "relu": F.relu}


def _weighted_mean(x: Tensor, first: int) -> Tensor:
    weights = torch.arange(first + 1, first + len(x) + 1, dtype=torch.float32, device=x.device)
    return (x * weights[:, None]).sum(0) / weights.sum()


_POOLS: dict[PoolingKind, Callable[[Tensor, int], Tensor]] = {
    "first": lambda x, first: x[0],
    "max": lambda x, first: x.amax(0),
    "mean": lambda x, first: x.mean(0),
    "sqrt_mean": lambda x, first: x.sum(0) / len(x) ** 0.5,
    "weighted_mean": _weighted_mean,
    "last": lambda x, first: x[-1],
}
"""Make a vector of the pooled positions of a text: float32 [n, hidden], and the number of the first one."""


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

    def pooled(self, hidden: Tensor, lengths: Sequence[int], prompts: Sequence[int] | None = None) -> Tensor:
        """[T, hidden], all positions of texts of these lengths, after the last norm -> float32 [texts, hidden *
        kinds]. A text's sum runs over its own positions alone, so it has the same bits in any batch. prompts: of
        each text, how many of its first positions are not pooled."""
        rows, at = [], 0
        for k, n in enumerate(lengths):
            first = 0 if prompts is None else min(prompts[k], n - 1)
            own = hidden[at + first : at + n].float()
            rows.append(torch.cat([_POOLS[kind](own, first) for kind in self.plan.kinds]))
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
