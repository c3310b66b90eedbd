"""Moondream's decoder: a decoder with eyes, and with coordinates and sizes as inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petiole.gpu_worker.models.moondream.region import RegionHead
from petiole.gpu_worker.models.moondream.vision_encoder import VisionEncoder
from petiole.gpu_worker.models.vision.seeing import SeeingDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class MoondreamDecoder(SeeingDecoder):
    """Implements `ValueDecoder` and `CropDecoder`."""

    vision: VisionEncoder
    region: RegionHead

    @property
    def crop_shape(self) -> tuple[int, ...]:
        size = self.vision.config.geometry.size
        return size, size, 3

    def crop_features(self, crops: Tensor) -> Tensor:
        return self.vision.features(crops)

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        return self.vision.projected(features, tiling)[None]

    def embed_value(self, kind: str, numbers: Tensor) -> Tensor:
        return self.region.embedded(kind, numbers.long())

    def made_value(self, kind: str, hidden: Tensor) -> Tensor:
        return self.region.logits(kind, hidden).argmax(-1)
