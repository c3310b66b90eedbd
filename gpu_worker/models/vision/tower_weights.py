"""The names of towers' tensors, and how they become weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.loading import LoadOptions, read_layers
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import Norm
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.joining import Average, Joining, Merger, Shuffle
from petiole.gpu_worker.models.vision.tower import AxisTables, BentTable, NearestTable, Positions, Tower
from petiole.gpu_worker.models.weights.copying import TensorSource, read_linear, read_tensor
from petiole.gpu_worker.models.weights.linear import ClippedLinear, DenseLinear, JoinedLinear, Linear
from petiole.gpu_worker.models.weights.names import Names, StoredLinear

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
SIGLIP = Names(
    layer="encoder.layers.{}.",
    mixer_norm="layer_norm1",
    out=("self_attn.out_proj",),
    feed_forward_norm="layer_norm2",
    gate_up=("mlp.fc1",),
    down=("mlp.fc2",),
)
GEMMA4 = Names(
    layer="encoder.layers.{}.",
    qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    out=("self_attn.o_proj.linear",),
    gate_up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
    down=("mlp.down_proj.linear",),
    feed_forward_norm="pre_feedforward_layernorm",
)
PIXTRAL = Names(
    layer="transformer.layers.{}.",
    mixer_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out=("attention.o_proj",),
    feed_forward_norm="ffn_norm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down=("feed_forward.down_proj",),
)


@dataclass(frozen=True, slots=True)
class TowerReader:
    """values: see `ResizedPictures.values`."""

    source: TensorSource
    config: TowerConfig
    options: LoadOptions
    prefix: str
    values: npt.NDArray[np.float32]

    def tower(
        self,
        names: Names,
        patches: DenseLinear,
        positions: Positions | None,
        merger: Joining,
        deep: tuple[Joining, ...] = (),
    ) -> Tower:
        kept = self.options.empty(self.values.shape, torch.float32)
        return Tower(
            config=self.config,
            patches=patches,
            positions=positions,
            stack=read_layers(self.source, self.config.plan, names, self.options, self.prefix),
            merger=merger,
            deep=deep,
            values=kept if self.on_meta else kept.copy_(torch.from_numpy(self.values)),
        )

    @property
    def on_meta(self) -> bool:
        return self.options.device.type == "meta"

    @property
    def beside(self) -> str:
        """Before the names of what stands beside the tower."""
        return self.prefix.partition("vision_")[0]

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return read_tensor(self.source, self.prefix + name, shape, self.options, dtype)

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        return read_linear(self.source, [self.prefix + name], [outputs], inputs, self.options, bias=bias)

    def norm(self, plan: Norm, name: str, width: int) -> NormWeights:
        weight = None
        if plan.weight:
            weight = self.tensor(f"{name}.weight", width, dtype=torch.float32 if plan.offset else None)
            weight += plan.offset
        return NormWeights(weight, self.tensor(f"{name}.bias", width) if plan.bias else None)


def read_qwen(of: TowerReader) -> Tower:
    """Qwen2.5-VL, Qwen3-VL, Qwen3.5."""
    config, hidden = of.config, of.config.hidden
    kernel = of.tensor("patch_embed.proj.weight", hidden, 3, config.frames, config.patch, config.patch)
    bias = of.tensor("patch_embed.proj.bias", hidden) if config.table else None
    return of.tower(
        OF_WINDOWS if config.window else NAMES,
        patches=DenseLinear(kernel.flatten(1), bias),  # a convolution whose steps are as long as its kernel
        positions=BentTable(of.tensor("pos_embed.weight", config.table**2, hidden), config.table)
        if config.table
        else None,
        merger=_merger(of, "merger.", joins_first=False),
        deep=tuple(_merger(of, f"deepstack_merger_list.{k}.", joins_first=True) for k in range(len(config.taps))),
    )


def _merger(of: TowerReader, at: str, *, joins_first: bool) -> Merger:
    config = of.config
    wide = config.hidden * config.merge**2
    norm, *linears = ("ln_q", "mlp.0", "mlp.2") if config.window else ("norm", "linear_fc1", "linear_fc2")
    return Merger(
        norm=of.norm(config.norm, at + norm, wide if joins_first else config.hidden),
        first=of.linear(at + linears[0], wide, wide, bias=True),
        second=of.linear(at + linears[1], config.outputs, wide, bias=True),
        joins_first=joins_first,
        plan=config.norm,
        kernels=of.options.kernels,
    )


def read_gemma3(of: TowerReader) -> Tower:
    """SigLIP without its head, behind it Gemma 3's projection."""
    config, hidden = of.config, of.config.hidden
    kernel = of.tensor("embeddings.patch_embedding.weight", hidden, 3, config.patch, config.patch)
    table = of.tensor("embeddings.position_embedding.weight", config.table**2, hidden)
    beside = replace(of, prefix=f"{of.beside}multi_modal_projector.")
    product = beside.tensor("mm_input_projection_weight", hidden, config.outputs)
    final = config.plan.layers[0].mixer_norm
    assert final is not None
    return of.tower(
        SIGLIP,
        patches=DenseLinear(kernel.flatten(1), of.tensor("embeddings.patch_embedding.bias", hidden)),
        positions=BentTable(table, config.table),
        merger=Average(
            norm=beside.norm(config.norm, "mm_soft_emb_norm", hidden),
            product=DenseLinear(product.T),
            plan=config.norm,
            kernels=of.options.kernels,
            final=final,
            final_norm=of.norm(final, "post_layernorm", hidden),
        ),
    )


def read_smolvlm(of: TowerReader) -> Tower:
    """SigLIP, behind it one product of joined patches."""
    config, hidden = of.config, of.config.hidden
    kernel = of.tensor("embeddings.patch_embedding.weight", hidden, 3, config.patch, config.patch)
    table = of.tensor("embeddings.position_embedding.weight", config.table**2, hidden)
    beside, wide = replace(of, prefix=f"{of.beside}connector."), hidden * config.merge**2
    return of.tower(
        SIGLIP,
        patches=DenseLinear(kernel.flatten(1), of.tensor("embeddings.patch_embedding.bias", hidden)),
        positions=NearestTable(table, config.table),
        merger=Shuffle(
            norm=of.norm(config.norm, "post_layernorm", hidden),
            product=beside.linear("modality_projection.proj", config.outputs, wide, bias=False),
            plan=config.norm,
            kernels=of.options.kernels,
        ),
    )


def read_gemma4(of: TowerReader) -> Tower:
    config, hidden, patch = of.config, of.config.hidden, of.config.patch
    stored = of.tensor("patch_embedder.input_proj.weight", hidden, patch * patch * 3)
    tables = of.tensor("patch_embedder.position_embedding_table", 2, config.table, hidden)
    beside = replace(of, prefix=f"{of.beside}embed_vision.")
    tower = of.tower(
        GEMMA4,
        patches=DenseLinear(_in_order(stored, _colours_first(patch), of)),
        positions=AxisTables(tables),
        merger=Average(
            norm=NormWeights(),
            product=beside.linear("embedding_projection", config.outputs, hidden, bias=False),
            plan=config.norm,
            kernels=of.options.kernels,
            factor=hidden**0.5,
            shift=of.tensor("std_bias", hidden) if config.standard else None,
            scale=of.tensor("std_scale", hidden) if config.standard else None,
        ),
    )
    order = torch.arange(config.plan.layers[0].attention.head_dim).view(2, 2, -1).transpose(0, 1).flatten()
    stack = _turning(tower.stack, order, of)
    if config.clipped:
        stack = replace(stack, layers=tuple(_clipped(layer, i, of) for i, layer in enumerate(stack.layers)))
    return replace(tower, stack=stack)


def read_pixtral(of: TowerReader) -> Tower:
    """Pixtral's tower, behind it Mistral's projection."""
    config, hidden, joined = of.config, of.config.hidden, of.config.merge**2
    norm = config.plan.layers[0].mixer_norm
    assert norm is not None
    kernel = of.tensor("patch_conv.weight", hidden, 3, config.patch, config.patch)
    beside = replace(of, prefix=f"{of.beside}multi_modal_projector.")
    before = beside.tensor("patch_merger.merging_layer.weight", hidden, hidden * joined)
    patches_first = torch.arange(hidden * joined).view(hidden, joined).T.flatten()
    tower = of.tower(
        PIXTRAL,
        patches=DenseLinear(kernel.flatten(1)),
        positions=None,
        merger=Merger(
            norm=beside.norm(config.norm, "norm", hidden),
            first=beside.linear("linear_1", config.outputs, hidden, bias=config.biased),
            second=beside.linear("linear_2", config.outputs, config.outputs, bias=config.biased),
            joins_first=False,
            plan=config.norm,
            kernels=of.options.kernels,
            before=DenseLinear(_in_order(before, patches_first, of)),
        ),
    )
    order = torch.arange(config.plan.layers[0].attention.head_dim).view(2, 2, -1).transpose(1, 2).flatten()
    return replace(tower, stack=_turning(tower.stack, order, of), first_norm=of.norm(norm, "ln_pre", hidden))


def _colours_first(patch: int) -> Tensor:
    """The order (colour, row, column) of values that are stored as (row, column, colour)."""
    return torch.arange(patch * patch * 3).view(patch, patch, 3).permute(2, 0, 1).flatten()


def _in_order(weight: Tensor, order: Tensor, of: TowerReader, dim: int = -1) -> Tensor:
    """The same memory with its numbers in another order."""
    return weight if of.on_meta else weight.copy_(weight.index_select(dim, order.to(weight.device)))


def _turning(stack: Decoder, order: Tensor, of: TowerReader) -> Decoder:
    """The stack with the elements of its heads in an order in which each element of the first half turns with one
    of the second:

        Gemma 4  stored  a a' b b'    here  a b a' b'        a turns with a' by columns, b with b' by rows
        Pixtral  stored  a b a' b'    here  a0 b0 a1 b1 ...  a by rows, b by columns, each slower than the last
    """
    for plan, layer in zip(stack.plan.layers, stack.layers, strict=True):
        mixer, weights = plan.attention, layer.attention
        turned = mixer.q_size + mixer.kv_size
        rows = torch.arange(turned).view(-1, mixer.head_dim)[:, order].flatten()
        if not isinstance(weights.qkv, DenseLinear):
            raise ModelError(f"{of.prefix[:-1]}: must have plain weights, not quantised ones")
        _in_order(weights.qkv.weight[:turned], rows, of, dim=0)
        for norm in (weights.q_norm, weights.k_norm):
            if norm is not None and norm.weight is not None:
                _in_order(norm.weight, order, of)
    return stack


def _clipped(layer: LayerWeights, i: int, of: TowerReader) -> LayerWeights:
    """With the bounds of each stored product."""
    plan, at = of.config.plan, GEMMA4.layer.format(i)

    def bounded(linear: Linear, stored: StoredLinear | None) -> Linear:
        if not isinstance(linear, DenseLinear) or stored is None:
            raise ModelError(f"{of.prefix[:-1]}: must have plain weights, not quantised ones")
        parts = zip(stored.names, torch.split(linear.weight, list(stored.sizes)), strict=True)
        found = [ClippedLinear(weight, *bounds(at + name.removesuffix("linear"))) for name, weight in parts]
        return JoinedLinear(tuple(found)) if len(found) > 1 else found[0]

    def bounds(name: str) -> tuple[Tensor, ...]:
        return tuple(of.tensor(name + one) for one in ("input_min", "input_max", "output_min", "output_max"))

    stored = dict(GEMMA4.linears(plan.layers[i], plan.hidden_size))
    mixer, fed = layer.attention, layer.dense
    return replace(
        layer,
        mixer=replace(mixer, qkv=bounded(mixer.qkv, stored["qkv"]), out=bounded(mixer.out, stored["out"])),
        feed_forward=replace(
            fed, gate_up=bounded(fed.gate_up, stored["gate_up"]), down=bounded(fed.down, stored["down"])
        ),
    )
