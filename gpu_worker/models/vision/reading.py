"""Reads the tower of a checkpoint beside its decoder of text.

A checkpoint may have a configuration of a tower and no tensors of it: then it is a decoder of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.loading import LoadOptions, Model, Reader, read_decoder, read_layers
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.pictures import MOST_UNEQUAL, grid_pictures
from petiole.gpu_worker.models.vision.seeing import SeeingDecoder
from petiole.gpu_worker.models.vision.tower import Merger, Tower
from petiole.gpu_worker.models.weights.copying import TensorSource, read_linear, read_tensor
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.models.weights.names import Names
from petiole.gpu_worker.request.prepared_images import ImageLimits

NAMES = Names(
    layer="blocks.{}.",
    mixer_norm="norm1",
    qkv=("attn.qkv",),
    out=("attn.proj",),
    feed_forward_norm="norm2",
    gate_up=("mlp.linear_fc1",),
    down=("mlp.linear_fc2",),
)
OF_WINDOWS = replace(NAMES, gate_up=("mlp.gate_proj", "mlp.up_proj"), down=("mlp.down_proj",))
MOST_IMAGES = 1024
"""In a prompt: more do not fit into any context."""
MOST_PATCHES = 4096
"""In an encode step: four at 512 x 512, say. Those who wait for their next token wait for it."""


def with_eyes(of: Callable[[JsonObject, ModelPlan], TowerConfig]) -> Reader:
    """The `Reader` of a family. of: the dimensions of its tower, from config.json and the plan of its text."""

    def read(source: TensorSource, model: Model, options: LoadOptions) -> Decoder:
        return _read(source, model, options, of)

    return read


def _read(
    source: TensorSource, model: Model, options: LoadOptions, of: Callable[[JsonObject, ModelPlan], TowerConfig]
) -> Decoder:
    text = read_decoder(source, model, options)
    prefix = next((one for one in model.names.tower if one + "patch_embed.proj.weight" in source), None)
    if prefix is None or "vision_config" not in model.raw:
        return text
    config = of(model.raw, model.plan)
    pictures = grid_pictures(config, model.pictures or {})
    most = pictures.max_positions * config.merge**2 * MOST_UNEQUAL
    plain = replace(options, quantization="none", max_positions=int(most**0.5) + config.merge)
    with torch.no_grad():
        tower = _Weights(source, config, plain, prefix).tower(pictures.values())
    return SeeingDecoder.around(
        text,
        vision=tower,
        images=ImageLimits(
            MOST_IMAGES,
            pictures.max_positions,
            MOST_PATCHES,
            bidirectional=False,
            placeholder=config.placeholder,
            patches=config.merge**2,
        ),
        pictures=pictures,
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    source: TensorSource
    config: TowerConfig
    options: LoadOptions
    prefix: str

    def tower(self, values: npt.NDArray[np.float32]) -> Tower:
        """values: see `GridPictures.values`."""
        config, options = self.config, self.options
        hidden, table = config.hidden, config.table**2
        kept = options.empty(values.shape, torch.float32)
        return Tower(
            config=config,
            patches=self._patches(hidden),
            positions=self._tensor("pos_embed.weight", table, hidden) if table else None,
            stack=read_layers(
                self.source, config.plan, OF_WINDOWS if config.window else NAMES, options, self.prefix
            ),
            merger=self._merger("merger.", joins_first=False),
            deep=tuple(
                self._merger(f"deepstack_merger_list.{k}.", joins_first=True) for k in range(len(config.taps))
            ),
            values=kept if options.device.type == "meta" else kept.copy_(torch.from_numpy(values)),
        )

    def _patches(self, hidden: int) -> DenseLinear:
        """A convolution whose steps are as long as its kernel is a product."""
        config = self.config
        kernel = self._tensor("patch_embed.proj.weight", hidden, 3, config.frames, config.patch, config.patch)
        bias = self._tensor("patch_embed.proj.bias", hidden) if config.table else None
        return DenseLinear(kernel.flatten(1), bias)

    def _merger(self, at: str, *, joins_first: bool) -> Merger:
        config = self.config
        wide = config.hidden * config.merge**2
        normed = wide if joins_first else config.hidden
        norm, *linears = ("ln_q", "mlp.0", "mlp.2") if config.window else ("norm", "linear_fc1", "linear_fc2")
        bias = self._tensor(f"{at}{norm}.bias", normed) if config.norm.bias else None
        return Merger(
            norm=NormWeights(self._tensor(f"{at}{norm}.weight", normed), bias),
            first=self._linear(at + linears[0], wide, wide),
            second=self._linear(at + linears[1], config.outputs, wide),
            joins_first=joins_first,
            plan=config.norm,
            kernels=self.options.kernels,
        )

    def _linear(self, name: str, outputs: int, inputs: int) -> Linear:
        return read_linear(self.source, [self.prefix + name], [outputs], inputs, self.options, bias=True)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return read_tensor(self.source, self.prefix + name, shape, self.options)
