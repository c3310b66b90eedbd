"""The interface of decoders and encoders for code that computes their layers itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.decoder import DecoderLayer
from petiole.gpu_worker.models.layers import Linear

LayerNorm = tuple[Tensor, Tensor]
"""Weight and bias of a LayerNorm."""


@dataclass(frozen=True, slots=True)
class GeluLayer:
    """A layer with LayerNorms, whose MLP is a tanh-GELU without a gate: it takes all of `gate_up`.

    post_norm: before the MLP; None: attention and MLP stand side by side, both behind the input norm.
    """

    input_norm: LayerNorm
    qkv: Linear
    out: Linear
    post_norm: LayerNorm | None
    gate_up: Linear
    down: Linear


class LayeredDecoder(Protocol):
    """norm: a LayerNorm, or the weight of an RMSNorm."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def embedding(self) -> Tensor: ...
    @property
    def layers(self) -> Sequence[DecoderLayer | GeluLayer]: ...
    @property
    def norm(self) -> Tensor | LayerNorm: ...
    @property
    def head(self) -> Linear: ...
    @property
    def rotary(self) -> Tensor: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def embed(self, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder. positions: of a crop; hidden: of a position; inner: of an MLP."""

    positions: int
    hidden: int
    inner: int
    heads: int
    eps: float


class LayeredEncoder(Protocol):
    """An encoder whose layers see one crop at a time. Its features: `finished(layers(embedded(crops)))`."""

    @property
    def shape(self) -> EncoderShape: ...
    @property
    def layers(self) -> Sequence[GeluLayer]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def embedded(self, crops: Tensor) -> Tensor:
        """uint8 [n, height, width, 3] -> [n, positions, hidden]."""
        ...

    def finished(self, hidden: Tensor) -> Tensor:
        """[n, positions, hidden] behind the last layer -> features [n, ...]."""
        ...


class LayeredVision(Protocol):
    """An `ImageDecoder` with a layered encoder. It joins the features of crops into those of an image."""

    @property
    def vision(self) -> LayeredEncoder: ...

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The features of one image's crops -> the features of the image, as in `encode`."""
        ...
