"""The residual stream, to which layers add."""

from __future__ import annotations

from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, is_plain, normed, weight_of
from petiole.gpu_worker.models.plan import Norm


class Residual:
    """hidden [T, hidden], changed in place. An addition waits until the stream is read: kernels compute an
    addition and the norm after it in one pass."""

    def __init__(self, hidden: Tensor, kernels: Kernels) -> None:
        self._hidden, self._kernels = hidden, kernels
        self._waiting: Tensor | None = None

    @property
    def value(self) -> Tensor:
        if self._waiting is not None:
            self._hidden += self._waiting
            self._waiting = None
        return self._hidden

    def add(self, x: Tensor, factor: float = 1.0) -> None:
        """x may be overwritten later."""
        _ = self.value
        self._waiting = x if factor == 1.0 else x * factor

    def normed(self, norm: Norm | None, weights: NormWeights | None) -> Tensor:
        """The norm of the stream; without one the stream itself, which must not be changed."""
        if norm is None or weights is None:
            return self.value
        if self._waiting is not None and is_plain(norm, weights):
            x, self._waiting = self._waiting, None
            return self._kernels.add_rms_norm(x, self._hidden, weight_of(weights), norm.eps)
        return normed(norm, weights, self.value, self._kernels)

    def norm(self, norm: Norm | None, weights: NormWeights | None) -> None:
        """The stream becomes its norm."""
        self._hidden = self.normed(norm, weights)

    def scale(self, factor: Tensor) -> None:
        self._hidden = self.value.mul_(factor)
