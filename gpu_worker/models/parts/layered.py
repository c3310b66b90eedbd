"""The interface of encoders for code that computes their layers itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.plan import Layer


class LayeredEncoder(Protocol):
    """An encoder whose layers see one crop at a time. Its features: `finished(layers(embedded(crops)))`.
    hidden_size: the width of a position; n_positions: of a crop."""

    @property
    def plan(self) -> Sequence[Layer]: ...
    @property
    def layers(self) -> Sequence[LayerWeights]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_positions(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def embedded(self, crops: Tensor) -> Tensor:
        """uint8 [n, height, width, 3] -> [n, positions, hidden]."""
        ...

    def finished(self, hidden: Tensor) -> Tensor:
        """[n, positions, hidden] after the last layer -> features [n, ...]."""
        ...


class LayeredVision(Protocol):
    """An `ImageDecoder` with a layered encoder. It joins the features of crops into those of an image."""

    @property
    def vision(self) -> LayeredEncoder: ...

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The features of one image's crops -> the features of the image, as in `encode`."""
        ...
