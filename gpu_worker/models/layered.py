"""Decoders and encoders as code sees them that computes their layers itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.decoder import DecoderLayer
from petiole.gpu_worker.models.layers import Linear

LayerNorm = tuple[Tensor, Tensor]
"""Weight and bias."""


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


@runtime_checkable
class LayeredDecoder(Protocol):
    """norm: of an RMSNorm the weight."""

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
    """positions: of a crop; hidden: of a position; inner: of an MLP."""

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


@runtime_checkable
class LayeredVision(Protocol):
    """An `ImageDecoder` whose encoder is layered, and which makes an image of the features of crops."""

    @property
    def vision(self) -> LayeredEncoder: ...

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The features of one image's crops -> those of the image, as of `encode`."""
        ...
