"""From the patches of a block to one position of the decoder of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.plan import Norm
from petiole.gpu_worker.models.weights.linear import Linear


class Joining(Protocol):
    def __call__(self, hidden: Tensor, joined: int) -> Tensor:
        """[T, hidden], the patches of a block side by side -> [T / joined, outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class Merger:
    """Two products of the joined patches. joins_first: whether the norm is of the joined patches. before: a
    product before these."""

    norm: NormWeights
    first: Linear
    second: Linear
    joins_first: bool
    plan: Norm
    kernels: Kernels
    before: Linear | None = None

    def __call__(self, hidden: Tensor, joined: int) -> Tensor:
        width = hidden.shape[1] * joined
        x = hidden.reshape(-1, width) if self.joins_first else hidden
        x = normed(self.plan, self.norm, x, self.kernels).reshape(-1, width)
        x = x if self.before is None else self.before(x)
        return self.second(F.gelu(self.first(x)))


@dataclass(frozen=True, slots=True)
class Average:
    """The mean of the patches, a norm and a product. final, final_norm: of what the last layer makes. factor: of
    the mean. shift, scale: [hidden], by which features are brought to one scale: (x - shift) * scale."""

    norm: NormWeights
    product: Linear
    plan: Norm
    kernels: Kernels
    final: Norm | None = None
    final_norm: NormWeights | None = None
    factor: float = 1.0
    shift: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, hidden: Tensor, joined: int) -> Tensor:
        if self.final is not None and self.final_norm is not None:
            hidden = normed(self.final, self.final_norm, hidden, self.kernels)
        mean = hidden.float().view(-1, joined, hidden.shape[1]).mean(1).to(hidden.dtype).float() * self.factor
        if self.shift is not None and self.scale is not None:
            mean = (mean - self.shift.float()) * self.scale.float()
        return self.product(normed(self.plan, self.norm, mean.to(hidden.dtype), self.kernels))


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A norm of each patch, and a product of the joined ones."""

    norm: NormWeights
    product: Linear
    plan: Norm
    kernels: Kernels

    def __call__(self, hidden: Tensor, joined: int) -> Tensor:
        x = normed(self.plan, self.norm, hidden, self.kernels)
        return self.product(x.reshape(-1, hidden.shape[1] * joined))
