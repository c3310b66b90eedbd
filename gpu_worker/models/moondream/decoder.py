"""Moondream's decoder: the decoder of its plan, with an encoder of images, and with coordinates and sizes as
inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.moondream.region import RegionHead
from petiole.gpu_worker.models.moondream.vision_encoder import VisionEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class MoondreamDecoder(Decoder):
    """Implements `ValueDecoder` and `CropDecoder`. Text is computed as in any decoder."""

    vision: VisionEncoder
    region: RegionHead

    @staticmethod
    def around(text: Decoder, **more: Any) -> MoondreamDecoder:
        """A decoder of text with more: the fields of this class, and the limits of what it takes."""
        own = {field.name: getattr(text, field.name) for field in fields(Decoder)}
        return MoondreamDecoder(**own | more)

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> Sequence[Tensor]:
        return self.vision.encode(images)

    @property
    def crop_shape(self) -> tuple[int, ...]:
        size = self.vision.config.geometry.size
        return size, size, 3

    def encode_bytes(self, n_crops: int) -> int:
        return self.vision.working_bytes(n_crops)

    def crop_features(self, crops: Tensor) -> Tensor:
        return self.vision.features(crops)

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        return self.vision.projected(features, tiling)[None]

    def embed_value(self, kind: str, numbers: Tensor) -> Tensor:
        return self.region.embedded(kind, numbers.long())

    def made_value(self, kind: str, hidden: Tensor) -> Tensor:
        return self.region.logits(kind, hidden).argmax(-1)
