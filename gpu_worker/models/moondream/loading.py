"""Reads a Moondream 2 from safetensors with the published names.

A release may leave the leading `model.` out. Training checkpoints have other names and are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.loading import LoadOptions, TensorSource
from petiole.gpu_worker.models.checkpoint.safetensors import Checkpoint
from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.layers import DenseLinear
from petiole.gpu_worker.models.moondream.config import MoondreamConfig
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder, TextBlock, permuted, rotary_table_of
from petiole.gpu_worker.models.moondream.encoder import EncoderBlock, Mlp, Norm, VisionEncoder
from petiole.gpu_worker.models.moondream.processor import MoondreamProcessor
from petiole.gpu_worker.models.moondream.region import Region, coordinate_table, size_table
from petiole.gpu_worker.request.images import ImageLimits
from petiole.gpu_worker.request.values import ValueTokens


def load_moondream(folder: Path, config: ModelConfig, options: LoadOptions) -> Decoder:
    """The decoder of a model folder. Raises ModelError for missing tensors and wrong shapes."""
    if options.quantization != "none":
        raise ModelError(f"weight_quantization: must be none for Moondream, got {options.quantization}")
    with Checkpoint(folder) as checkpoint:
        if "text_model.lm_head.linear.weight" in checkpoint:
            raise ModelError(f"{folder}: a checkpoint with names of training (text_model.*) is not read")
        prefix = "model." if "model.text.wte" in checkpoint else ""
        return read_moondream(checkpoint, config, options, prefix)


def read_moondream(
    source: TensorSource, config: ModelConfig, options: LoadOptions, prefix: str = "model."
) -> Decoder:
    with torch.no_grad():
        return cast(Decoder, _Reader(source, cast(MoondreamConfig, config), options, prefix).decoder())


@dataclass(frozen=True, slots=True)
class _Reader:
    source: TensorSource
    config: MoondreamConfig
    options: LoadOptions
    prefix: str

    def decoder(self) -> MoondreamDecoder:
        config, tokens = self.config, self.config.tokens
        hidden, bins = config.hidden_size, config.region.bins
        rotary = rotary_table_of(self.options.max_positions, config.rope.theta, self.options.device)
        grid = config.vision.geometry
        return MoondreamDecoder(
            config=config,
            embedding=self._tensor("text.wte", config.vocab_size, hidden),
            blocks=tuple(self._text_block(f"text.blocks.{i}.") for i in range(config.n_layers)),
            norm=self._norm("text.post_ln", hidden),
            head=self._linear("text.lm_head", config.vocab_size, hidden),
            rotary=self.options.empty(rotary.shape, rotary.dtype).copy_(rotary),
            vision=self._vision(),
            region=self._region(),
            value_tokens=ValueTokens(tokens.coordinate, tokens.size, coordinate_table(bins), size_table(bins)),
            images=ImageLimits(
                max_images=1,
                max_positions=grid.grid**2,
                max_crops=1 + grid.max_crops,
                bidirectional=True,
                lead=1,
            ),
            processor=MoondreamProcessor(config),
        )

    def _text_block(self, at: str) -> TextBlock:
        config, hidden = self.config, self.config.hidden_size
        rotated = config.q_size + config.kv_size

        def in_order(rows: Tensor) -> Tensor:
            return torch.cat([permuted(rows[:rotated]), rows[rotated:]])

        return TextBlock(
            norm=self._norm(at + "ln", hidden),
            qkv=self._linear(at + "attn.qkv", rotated + config.kv_size, hidden, in_order),
            proj=self._linear(at + "attn.proj", hidden, config.q_size),
            mlp=self._mlp(at + "mlp", hidden, config.intermediate_size, hidden),
        )

    def _vision(self) -> VisionEncoder:
        vision = self.config.vision
        dim, patch, grid = vision.dim, vision.geometry.patch, vision.geometry.grid
        return VisionEncoder(
            config=vision,
            patches=self._linear("vision.patch_emb", dim, 3 * patch**2),
            positions=self._tensor("vision.pos_emb", 1, grid**2, dim),
            blocks=tuple(self._vision_block(f"vision.blocks.{i}.") for i in range(vision.layers)),
            norm=self._norm("vision.post_ln", dim),
            projection=self._mlp("vision.proj_mlp", 2 * dim, vision.projection, self.config.hidden_size),
        )

    def _vision_block(self, at: str) -> EncoderBlock:
        dim = self.config.vision.dim
        return EncoderBlock(
            ln1=self._norm(at + "ln1", dim),
            qkv=self._linear(at + "attn.qkv", 3 * dim, dim),
            proj=self._linear(at + "attn.proj", dim, dim),
            ln2=self._norm(at + "ln2", dim),
            mlp=self._mlp(at + "mlp", dim, self.config.vision.ff, dim),
        )

    def _region(self) -> Region:
        region, hidden = self.config.region, self.config.hidden_size
        tables = (coordinate_table(region.bins), size_table(region.bins))
        coordinates, sizes = (self.options.empty((region.bins,)).copy_(torch.tensor(table)) for table in tables)
        return Region(
            coordinate_encoder=self._linear("region.coord_encoder", hidden, region.coordinate_features),
            size_encoder=self._linear("region.size_encoder", hidden, region.size_features),
            coordinate_decoder=self._mlp("region.coord_decoder", hidden, region.inner, region.bins),
            size_decoder=self._mlp("region.size_decoder", hidden, region.inner, 2 * region.bins),
            coordinate_features=self._tensor("region.coord_features", 1, region.coordinate_features // 2),
            size_features=self._tensor("region.size_features", 2, region.size_features // 2),
            coordinates=coordinates,
            sizes=sizes,
        )

    def _mlp(self, at: str, inputs: int, inner: int, outputs: int) -> Mlp:
        return Mlp(self._linear(at + ".fc1", inner, inputs), self._linear(at + ".fc2", outputs, inner))

    def _norm(self, at: str, size: int) -> Norm:
        return self._tensor(at + ".weight", size), self._tensor(at + ".bias", size)

    def _linear(
        self, at: str, outputs: int, inputs: int, order: Callable[[Tensor], Tensor] | None = None
    ) -> DenseLinear:
        weight, bias = self._tensor(at + ".weight", outputs, inputs), self._tensor(at + ".bias", outputs)
        if order is not None:
            for tensor in (weight, bias):
                tensor.copy_(order(tensor))
        return DenseLinear(weight, bias)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.options.empty(shape)
        self.source.copy(self.prefix + name, tensor)
        return tensor
