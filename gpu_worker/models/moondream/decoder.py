"""The text decoder: one LayerNorm, attention and MLP side by side in a layer, coordinates and images as inputs.

Only half of a head is rotated. To rotate with a table for whole heads, the rows of queries and keys are permuted
when they are loaded, and the other half of the table rotates by nothing: dimensions 0 to 15 pair with 32 to 47,
which were 16 to 31."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.decoder import Forward
from petiole.gpu_worker.models.layered import GeluLayer
from petiole.gpu_worker.models.layers import Linear, Rotation
from petiole.gpu_worker.models.moondream.config import HEAD_DIM, ROTARY_DIM, MoondreamConfig
from petiole.gpu_worker.models.moondream.encoder import Mlp, Norm, VisionEncoder, layer_norm
from petiole.gpu_worker.models.moondream.processor import MoondreamProcessor
from petiole.gpu_worker.models.moondream.region import Region
from petiole.gpu_worker.request.images import ImageLimits
from petiole.gpu_worker.request.values import ValueTokens


@dataclass(frozen=True, slots=True)
class TextBlock:
    norm: Norm
    qkv: Linear
    proj: Linear
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class MoondreamDecoder:
    """Implements the part of `Decoder` that the runtime uses, `ValueDecoder` and `CropDecoder`. rotary: see
    `rotary_table`."""

    config: MoondreamConfig
    embedding: Tensor
    blocks: tuple[TextBlock, ...]
    norm: Norm
    head: Linear
    rotary: Tensor
    vision: VisionEncoder
    region: Region
    value_tokens: ValueTokens
    images: ImageLimits
    processor: MoondreamProcessor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def layers(self) -> tuple[GeluLayer, ...]:
        """The blocks, as compiled code reads them."""
        return tuple(
            GeluLayer(block.norm, block.qkv, block.proj, None, block.mlp.fc1, block.mlp.fc2)
            for block in self.blocks
        )

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> Sequence[Tensor]:
        return self.vision.encode(images)

    @property
    def crop_shape(self) -> tuple[int, ...]:
        size = self.config.vision.geometry.size
        return size, size, 3

    def encode_bytes(self, n_crops: int) -> int:
        return self.vision.working_bytes(n_crops)

    def crop_features(self, crops: Tensor) -> Tensor:
        return self.vision.features(crops)

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        return self.vision.projected(features, tiling)[None]

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(token_ids, self.embedding)

    def embed_coordinates(self, bins: Tensor) -> Tensor:
        return self.region.embed_coordinates(bins.long())

    def embed_sizes(self, bins: Tensor) -> Tensor:
        return self.region.embed_sizes(bins.long())

    def coordinate_bins(self, hidden: Tensor) -> Tensor:
        return self.region.coordinate_logits(hidden).argmax(-1)

    def size_bins(self, hidden: Tensor) -> Tensor:
        return self.region.size_logits(hidden).argmax(-1)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        """[T, hidden] -> [T, hidden], without the final norm; `hidden` is overwritten."""
        for i, block in enumerate(self.blocks):
            x = layer_norm(hidden, block.norm)
            q, k, v = torch.split(block.qkv(x).view(len(x), -1, HEAD_DIM), self._heads, dim=1)
            rotation = Rotation(None, 0.0, step.positions, self.rotary)
            hidden += block.proj(step.attention.attend(i, q, k, v, rotation))
            hidden += block.mlp(x)
        return hidden

    def head_output(self, hidden: Tensor) -> Tensor:
        return self.head(layer_norm(hidden, self.norm))

    @property
    def _heads(self) -> list[int]:
        config = self.config
        return [config.n_heads, config.n_kv_heads, config.n_kv_heads]


def rotary_table_of(n_positions: int, theta: float, device: torch.device) -> Tensor:
    """float32 [n_positions, HEAD_DIM]: cosines, then sines. The second half of each rotates by nothing."""
    half = ROTARY_DIM // 2
    frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.arange(n_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    angles = torch.nn.functional.pad(angles, (0, (HEAD_DIM - ROTARY_DIM) // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def permuted(rows: Tensor) -> Tensor:
    """Rows of queries or keys [heads * HEAD_DIM, ...] in the order that the table expects."""
    quarter = ROTARY_DIM // 2
    heads = rows.reshape(-1, HEAD_DIM, *rows.shape[1:])
    sizes = [quarter, quarter, quarter, HEAD_DIM - 3 * quarter]
    first, second, third, rest = torch.split(heads, sizes, dim=1)
    return torch.cat([first, third, second, rest], dim=1).flatten(0, 1)
