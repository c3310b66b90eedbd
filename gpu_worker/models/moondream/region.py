"""Coordinates and sizes: their embeddings, and how they are decoded from hidden states.

A bin is a whole number. Its value is rounded to the model's type before it is embedded. The tables are those of
the reference implementation: coordinate = bin / bins, size = 2^(10 bin / (bins - 1) - 10)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.moondream.values import SIZE
from petiole.gpu_worker.models.moondream.vision_encoder import Mlp
from petiole.gpu_worker.models.weights.linear import Linear


def coordinate_table(bins: int) -> tuple[float, ...]:
    return tuple(k / bins for k in range(bins))


def size_table(bins: int) -> tuple[float, ...]:
    return tuple(2.0 ** (k / (bins - 1) * 10.0 - 10.0) for k in range(bins))


@dataclass(frozen=True, slots=True)
class RegionHead:
    """coordinate_features: [1, n], size_features: [2, m], frequencies; the tables: [bins] in the model's type."""

    coordinate_encoder: Linear
    size_encoder: Linear
    coordinate_decoder: Mlp
    size_decoder: Mlp
    coordinate_features: Tensor
    size_features: Tensor
    coordinates: Tensor
    sizes: Tensor

    def embedded(self, kind: str, bins: Tensor) -> Tensor:
        """int [n, 1], coordinates, or [n, 2], widths and heights -> [n, hidden]."""
        if kind == SIZE:
            return self.size_encoder(_fourier(self.sizes[bins], self.size_features))
        return self.coordinate_encoder(_fourier(self.coordinates[bins], self.coordinate_features))

    def logits(self, kind: str, hidden: Tensor) -> Tensor:
        """Hidden states before the final norm: [n, hidden] -> [n, numbers of the kind, bins]."""
        made = self.size_decoder(hidden) if kind == SIZE else self.coordinate_decoder(hidden)
        return made.view(len(hidden), 2 if kind == SIZE else 1, -1)


def _fourier(values: Tensor, features: Tensor) -> Tensor:
    angles = 2 * math.pi * values @ features
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
