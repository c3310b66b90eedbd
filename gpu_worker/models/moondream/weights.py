"""Reads a Moondream 2 from safetensors with the published names.

A release may leave the leading `model.` out. Training checkpoints have other names and are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.loading import LoadOptions, Model, read_decoder
from petiole.gpu_worker.models.moondream.config import MoondreamConfig, parse_moondream_config
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder
from petiole.gpu_worker.models.moondream.processor import MoondreamProcessor
from petiole.gpu_worker.models.moondream.region import RegionHead, coordinate_table, size_table
from petiole.gpu_worker.models.moondream.values import value_kinds
from petiole.gpu_worker.models.moondream.vision_encoder import Mlp, VisionEncoder
from petiole.gpu_worker.models.parts.attention import AttentionWeights
from petiole.gpu_worker.models.parts.feed_forward import FeedForwardWeights
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.weights.copying import TensorSource, read_tensor
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.request.prepared_images import ImageLimits


def read_moondream(source: TensorSource, model: Model, options: LoadOptions) -> Decoder:
    """A `Reader`: the decoder of text, and what stands beside it."""
    if options.quantization == "fp8" or (options.quantization == "int4" and options.device.type == "cuda"):
        # nobody has tried its captured encodes and decodes with values
        known = "none" if options.device.type == "cuda" else "none, int8 or int4"
        raise ModelError(f"weight_quantization: must be {known} for Moondream, got {options.quantization}")
    prefix = model.names.prefix_in(source)
    if prefix + model.names.embedding not in source and "text_model.lm_head.linear.weight" in source:
        raise ModelError("a Moondream with names of training (text_model.*) is not read")
    text, config = read_decoder(source, model, options), parse_moondream_config(model.raw)
    tokens, geometry, bins = config.tokens, config.vision.geometry, config.region.bins
    with torch.no_grad():
        reader = _WeightsReader(source, config, options, prefix)
        return MoondreamDecoder.around(
            text,
            vision=reader.vision(),
            region=reader.region(),
            value_tokens=value_kinds(tokens.coordinate, tokens.size, coordinate_table(bins), size_table(bins)),
            images=ImageLimits(
                max_images=1,
                max_positions=geometry.grid**2,
                max_crops=1 + geometry.max_crops,
                bidirectional=True,
                lead=1,
            ),
            pictures=MoondreamProcessor(config),
            processor=MoondreamProcessor(config),
        )


@dataclass(frozen=True, slots=True)
class _WeightsReader:
    source: TensorSource
    config: MoondreamConfig
    options: LoadOptions
    prefix: str

    def vision(self) -> VisionEncoder:
        vision = self.config.vision
        dim, patch, grid = vision.dim, vision.geometry.patch, vision.geometry.grid
        return VisionEncoder(
            config=vision,
            patches=self._linear("vision.patch_emb", dim, 3 * patch**2),
            positions=self._tensor("vision.pos_emb", 1, grid**2, dim),
            layers=tuple(self._vision_layer(f"vision.blocks.{i}.") for i in range(vision.layers)),
            norm=self._norm("vision.post_ln", dim),
            projection=self._mlp("vision.proj_mlp", 2 * dim, vision.projection, self.config.text.hidden_size),
        )

    def _vision_layer(self, at: str) -> LayerWeights:
        dim, inner = self.config.vision.dim, self.config.vision.ff
        return LayerWeights(
            mixer_norm=self._norm(at + "ln1", dim),
            mixer=AttentionWeights(
                qkv=self._linear(at + "attn.qkv", 3 * dim, dim), out=self._linear(at + "attn.proj", dim, dim)
            ),
            feed_forward_norm=self._norm(at + "ln2", dim),
            feed_forward=FeedForwardWeights(
                gate_up=self._linear(at + "mlp.fc1", inner, dim), down=self._linear(at + "mlp.fc2", dim, inner)
            ),
        )

    def region(self) -> RegionHead:
        region, hidden = self.config.region, self.config.text.hidden_size
        tables = (coordinate_table(region.bins), size_table(region.bins))
        coordinates, sizes = (self.options.empty((region.bins,)).copy_(torch.tensor(table)) for table in tables)
        return RegionHead(
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

    def _norm(self, at: str, size: int) -> NormWeights:
        return NormWeights(self._tensor(at + ".weight", size), self._tensor(at + ".bias", size))

    def _linear(self, at: str, outputs: int, inputs: int) -> DenseLinear:
        return DenseLinear(self._tensor(at + ".weight", outputs, inputs), self._tensor(at + ".bias", outputs))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return read_tensor(self.source, self.prefix + name, shape, self.options)
