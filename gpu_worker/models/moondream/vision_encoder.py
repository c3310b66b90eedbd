"""The vision encoder: crops to the inputs of the text decoder.

crops [n, size, size, 3] -> patches -> blocks of attention and MLP -> features [n, grid, grid, dim]
the first crop is the whole picture; the others are joined without their inner margins and pooled to one grid
[whole, local] -> projection -> [grid * grid, hidden]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.moondream.config import NORM, VisionConfig
from petiole.gpu_worker.models.moondream.crops import CropGeometry, Tiling
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import Layer
from petiole.gpu_worker.models.weights.linear import Linear


def layer_norm(x: Tensor, norm: NormWeights | None) -> Tensor:
    assert norm is not None
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, NORM.eps)


@dataclass(frozen=True, slots=True)
class Mlp:
    fc1: Linear
    fc2: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """positions: [1, grid², dim]. layers: of the plan of its configuration."""

    config: VisionConfig
    patches: Linear
    positions: Tensor
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    projection: Mlp

    def encode(self, images: Sequence[tuple[Tensor, Tiling]]) -> list[Tensor]:
        """uint8 crops of several images, with their tilings -> [1, grid², hidden] for each. All crops are one
        batch."""
        n_crops = [len(crops) for crops, _ in images]
        features = self.features(torch.cat([crops for crops, _ in images]))
        tilings = (tiling for _, tiling in images)
        return [
            self.projected(part, tiling)[None]
            for part, tiling in zip(torch.split(features, n_crops), tilings, strict=True)
        ]

    def working_bytes(self, n_crops: int) -> int:
        """Memory of the largest tensors that live at once: in a block, or at the end of an image."""
        config, positions = self.config, self.config.geometry.grid**2
        in_block = 3 * config.dim + max(5 * config.dim, 2 * config.ff)
        at_end = 4 * config.dim + 3 * config.projection
        return positions * max(n_crops * in_block, at_end) * self.positions.element_size()

    @property
    def plan(self) -> tuple[Layer, ...]:
        return self.config.plan

    @property
    def hidden_size(self) -> int:
        return self.config.dim

    @property
    def n_positions(self) -> int:
        return self.config.geometry.grid**2

    @property
    def dtype(self) -> torch.dtype:
        return self.positions.dtype

    def features(self, crops: Tensor) -> Tensor:
        """uint8 [n, size, size, 3] -> [n, grid, grid, dim]."""
        heads, x = self.config.heads, self.embedded(crops)
        for layer in self.layers:
            mixer, fed = layer.attention, layer.dense
            qkv = mixer.qkv(layer_norm(x, layer.mixer_norm))
            q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            x = x + mixer.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + fed.down(F.gelu(fed.gate_up(layer_norm(x, layer.feed_forward_norm)), approximate="tanh"))
        return self.finished(x)

    def embedded(self, crops: Tensor) -> Tensor:
        """uint8 [n, size, size, 3] -> [n, grid², dim]."""
        return self.patches(patches_of(crops, self.config.geometry, self.dtype)) + self.positions

    def finished(self, hidden: Tensor) -> Tensor:
        """[n, grid², dim] after the last layer -> [n, grid, grid, dim]."""
        grid = self.config.geometry.grid
        return layer_norm(hidden, self.norm).view(len(hidden), grid, grid, -1)

    def projected(self, features: Tensor, tiling: Tiling) -> Tensor:
        """The inputs of one image: [crops, grid, grid, dim] -> [grid², hidden]."""
        geometry = self.config.geometry
        local = joined(features[1:], tiling, geometry.margin).permute(2, 0, 1)
        pooled = F.adaptive_avg_pool2d(local, geometry.grid).permute(1, 2, 0)
        return self.projection(torch.cat([features[0], pooled], dim=-1).flatten(0, 1))


def patches_of(crops: Tensor, geometry: CropGeometry, dtype: torch.dtype) -> Tensor:
    """uint8 [n, size, size, 3] -> [n, grid², 3 * patch²]: from -1 to 1, by channel, row and column."""
    grid, patch = geometry.grid, geometry.patch
    x = crops.permute(0, 3, 1, 2).to(dtype).div_(255.0).sub_(0.5).div_(0.5)
    x = x.reshape(len(x), 3, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(len(x), grid**2, 3 * patch**2)


def joined(local: Tensor, tiling: Tiling, margin: int) -> Tensor:
    """Crops side by side, without the margins at inner edges: [rows * columns, grid, grid, dim] -> [h, w, dim]."""
    rows, columns = tiling
    crops = local.reshape(rows, columns, *local.shape[1:])

    def kept(at: int, n: int) -> slice:
        return slice(margin if at else 0, None if at == n - 1 else -margin)

    return torch.cat(
        [
            torch.cat([crops[i, j, kept(i, rows), kept(j, columns)] for j in range(columns)], dim=1)
            for i in range(rows)
        ]
    )
