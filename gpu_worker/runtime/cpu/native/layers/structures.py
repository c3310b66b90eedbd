"""`Structures`: the layers of a plan, and what stands before and after them, as structures of C."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.attention import AttentionWeights, BiasTable, Distances, LatentWeights
from petiole.gpu_worker.models.parts.experts import ExpertWeights
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.parts.per_layer import PerLayerTables
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.mixing import RecurrentWeights
from petiole.gpu_worker.models.parts.recurrent.short import ShortConvolutionWeights
from petiole.gpu_worker.models.parts.recurrent.states import LayerState
from petiole.gpu_worker.models.plan import (
    Attention,
    Experts,
    FeedForward,
    Growth,
    Latent,
    Layer,
    Norm,
    PerLayerInput,
    Recurrent,
    ShortConvolution,
)
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.models.weights.stacked import StackedLinear
from petiole.gpu_worker.runtime.cpu.native.layers.model import (
    ACTIVATIONS,
    MAPS,
    MASKS,
    NORMS,
    SCORES,
    BendStruct,
    ExpertsStruct,
    HeadsStruct,
    LatentsStruct,
    LayerStruct,
    ModelStruct,
    NormStruct,
)
from petiole.gpu_worker.runtime.cpu.native.products.weights import EMPTY, KINDS, LinearStruct, Weights
from petiole.gpu_worker.runtime.cpu.native.recurrent.structures import recurrent_struct


@dataclass(frozen=True)
class KVPointers:
    """keys, values: of each layer, [slots, kv_heads, head_dim]; tables: of each layer, int32 [rows, columns].
    states: of each layer; empty: none keeps any."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tables: Sequence[Tensor]
    page_size: int
    states: Sequence[LayerState | None] = ()


@dataclass(frozen=True)
class EmbeddingAndHead:
    """What turns token ids into the first layer's inputs, and hidden states into logits. embedding_factor: of the
    embeddings of token ids; factor, softcap: of logits."""

    embedding_factor: float
    embedding_norm: Norm | None
    embedding_norm_weights: NormWeights | None
    norm: Norm | None
    norm_weights: NormWeights | None
    head: Linear
    factor: float
    softcap: float


@dataclass(frozen=True)
class PerLayer:
    """The per-layer inputs of all layers."""

    plan: PerLayerInput
    tables: PerLayerTables


class Structures:
    """Makes structures, and keeps alive what they refer to: the memory, and the weights, which it rearranges in
    place. dtype: of the model."""

    def __init__(self, library: ctypes.CDLL, memory: KVPointers, dtype: torch.dtype) -> None:
        self._memory = memory
        self._weights = Weights(library, dtype)
        self._tables: dict[object, int | None] = {}
        self._structures: list[object] = []

    def layer(
        self, i: int, plan: Layer, weights: LayerWeights, per_layer: PerLayer | None, table: Tensor | None
    ) -> LayerStruct:
        fed = plan.feed_forward
        layer = LayerStruct(
            mixer_norm=self.norm(plan.mixer_norm, weights.mixer_norm),
            mixer_out_norm=self.norm(plan.mixer_out_norm, weights.mixer_out_norm),
            feed_forward_norm=self.norm(plan.feed_forward_norm, weights.feed_forward_norm),
            feed_forward_out_norm=self.norm(plan.feed_forward_out_norm, weights.feed_forward_out_norm),
            **dict.fromkeys(MAPS, EMPTY),
            bend=BendStruct(0.0, 1.0, 0.0),
            parallel=plan.parallel,
            post_norm=plan.post_norm,
            residual=plan.residual,
            scalar=1.0 if weights.scalar is None else float(weights.scalar),
        )
        if isinstance(plan.mixer, Attention):
            self._add_attention(layer, i, plan.mixer, weights.attention, table)
        else:
            assert not isinstance(weights.mixer, AttentionWeights)
            self._add_recurrent(layer, i, plan.mixer, weights.mixer)
        if fed is not None and weights.feed_forward is not None:
            layer.gate_up = self.linear(weights.feed_forward.gate_up)
            layer.down = self.linear(weights.feed_forward.down)
            layer.inner, layer.gated = fed.inner, fed.gated
            layer.activation = layer.gate_up.activation = ACTIVATIONS[fed.activation]
            layer.bend = bend_of(fed)
        if plan.experts is not None and weights.experts is not None:
            experts, router = self._experts(plan.experts, weights.experts)
            layer.experts, layer.router = ctypes.addressof(experts), router
        if per_layer is not None and weights.per_layer is not None:
            layer.per_layer = per_layer.plan.width
            layer.per_layer_activation = ACTIVATIONS[per_layer.plan.activation]
            layer.per_layer_gate = self._weights.linear(weights.per_layer.gate)
            layer.per_layer_out = self._weights.linear(weights.per_layer.out)
            layer.per_layer_norm = self.norm(per_layer.plan.layer_norm, weights.per_layer.norm)
        return layer

    def _add_attention(
        self, layer: LayerStruct, i: int, mixer: Attention, own: AttentionWeights, table: Tensor | None
    ) -> None:
        memory = self._memory
        layer.qkv, layer.out = self.linear(own.qkv), self.linear(own.out)
        layer.q_norm = self.norm(mixer.q_norm, own.q_norm)
        layer.k_norm = self.norm(mixer.k_norm, own.k_norm)
        layer.v_norm = self.norm(mixer.v_norm, own.v_norm)
        layer.heads = HeadsStruct(
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            kv_kind=KINDS[memory.keys[i].dtype],
            page_size=memory.page_size,
            mask=MASKS[mixer.mask],
            window=mixer.window,
            scale=mixer.scale,
            cap=mixer.softcap,
            sinks=self._weights.floats(own.sinks),
            bias=self._bias(own.distances),
            distances=own.distances.table.shape[1] if isinstance(own.distances, BiasTable) else 0,
            keys=memory.keys[i].data_ptr(),
            values=memory.values[i].data_ptr(),
            columns=memory.tables[i].shape[1],
            table=memory.tables[i].data_ptr(),
        )
        layer.rotary, layer.rotary_dims = self._table(table), 0 if table is None else table.shape[1]
        layer.neighbours = mixer.rotary is not None and mixer.rotary.neighbours
        layer.growth = self._growth(mixer.query_growth)
        layer.borrowed, layer.values_are_keys = mixer.keys_of is not None, mixer.values_are_keys
        layer.output_gate, layer.norm_whole = mixer.output_gate, mixer.norm_whole
        if mixer.latent is not None and own.latent is not None:
            self._add_latents(layer, mixer, mixer.latent, own.latent)

    def _add_latents(self, layer: LayerStruct, mixer: Attention, plan: Latent, own: LatentWeights) -> None:
        stacks = (
            StackedLinear(own.keys, mixer.heads, plan.rank),
            StackedLinear(own.values, mixer.heads, plan.value),
        )
        keys, values = map(self._each, stacks)
        latents = LatentsStruct(
            turning=mixer.head_dim - plan.rank,
            rank=plan.rank,
            own=plan.own,
            value=plan.value,
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            norm=self.norm(plan.norm, own.norm),
            query_norm=self.norm(plan.norm, own.query_norm),
        )
        if own.queries is not None:
            layer.net_gates = self._weights.linear(own.queries)
        layer.latents = ctypes.addressof(latents)
        self._structures += [latents, keys, values]

    def _add_recurrent(self, layer: LayerStruct, i: int, mixer: Recurrent, own: RecurrentWeights) -> None:
        state = self._memory.states[i]
        assert state is not None, "a layer without its states"
        layer.qkv, layer.out = self.linear(own.inputs), self.linear(own.out)
        if isinstance(own, DeltaNetWeights):
            layer.net_gates = self._weights.linear(own.gates)
        if not isinstance(mixer, ShortConvolution) and not isinstance(own, ShortConvolutionWeights):
            layer.net_norm = self.norm(mixer.norm, own.norm)
        struct = recurrent_struct(mixer, own, state, self._weights)
        layer.recurrent = ctypes.addressof(struct)
        self._structures.append(struct)

    def _experts(self, plan: Experts, weights: ExpertWeights) -> tuple[ExpertsStruct, LinearStruct]:
        """And the router's map, in float32 whatever the model's type."""
        router, of_router, own = plan.router, weights.router, self._weights
        up, down = (self._each(stack) for stack in (weights.gate_up, weights.down))
        taken = own.pointer(weights.taken)
        assert taken == weights.taken.data_ptr()
        experts = ExpertsStruct(
            n=router.experts,
            chosen=router.chosen,
            score=SCORES[router.score],
            normalised=router.normalised,
            groups=router.groups,
            best_groups=router.best_groups,
            of_group=router.of_group,
            of_stream=router.of_stream,
            inner=plan.each.inner,
            activation=ACTIVATIONS[plan.each.activation],
            gated=plan.each.gated,
            factor=router.factor,
            eps=router.eps,
            bend=bend_of(plan.each),
            correction=own.floats(of_router.correction),
            scale=own.floats(of_router.scale),
            shares=own.floats(of_router.expert_scales),
            gate_up=ctypes.addressof(up),
            down=ctypes.addressof(down),
            dense_gate=None if weights.dense_gate is None else own.floats(weights.dense_gate.weight),
            taken=taken,
            norm=self.norm(plan.norm, weights.norm),
            out_norm=self.norm(plan.out_norm, weights.out_norm),
            dense_out_norm=self.norm(plan.dense_out_norm, weights.dense_out_norm),
        )
        self._structures += [experts, up, down]
        logits = of_router.logits
        return experts, own.linear(DenseLinear(logits.weight.float(), logits.bias))

    def _each(self, stack: StackedLinear) -> ctypes.Array[LinearStruct]:
        return (LinearStruct * stack.n)(*(self._weights.linear(stack[i]) for i in range(stack.n)))

    def add_ends(self, model: ModelStruct, ends: EmbeddingAndHead) -> None:
        model.embedding_norm = self.norm(ends.embedding_norm, ends.embedding_norm_weights)
        model.norm = self.norm(ends.norm, ends.norm_weights)
        model.head = self.linear(ends.head)
        model.embedding_factor, model.logits_factor = ends.embedding_factor, ends.factor
        model.logits_cap = ends.softcap

    def add_per_layer(self, model: ModelStruct, per_layer: PerLayer) -> None:
        plan = per_layer.plan
        model.per_layer_projection = self._weights.linear(per_layer.tables.projection)
        model.per_layer_norm = self.norm(plan.norm, per_layer.tables.norm)
        model.per_layer_width = plan.width
        model.per_layer_embedding_factor = plan.embedding_factor
        model.per_layer_projection_factor, model.per_layer_factor = plan.projection_factor, plan.factor

    def linear(self, linear: Linear) -> LinearStruct:
        return self._weights.linear(linear)

    def norm(self, norm: Norm | None, weights: NormWeights | None) -> NormStruct:
        if norm is None or weights is None:
            return NormStruct()
        floats = self._weights.floats
        return NormStruct(NORMS[norm.kind], norm.eps, floats(weights.weight), floats(weights.bias))

    def _table(self, table: Tensor | None) -> int | None:
        """Layers share tables."""
        if id(table) not in self._tables:
            self._tables[id(table)] = self._weights.floats(table)
        return self._tables[id(table)]

    def _bias(self, distances: Distances | None) -> int | None:
        """Layers share biases."""
        if not isinstance(distances, BiasTable):
            return None
        if id(distances) not in self._tables:
            self._tables[id(distances)] = self._weights.floats(distances.table * math.log2(math.e))
        return self._tables[id(distances)]

    def _growth(self, growth: Growth | None) -> int | None:
        """The factors of queries at all positions."""
        if growth is None:
            return None
        if growth not in self._tables:
            at = torch.arange(self._memory.tables[0].shape[1] * self._memory.page_size, dtype=torch.float32)
            factors = 1 + growth.beta * torch.log1p(torch.floor(at / growth.length))
            self._tables[growth] = self._weights.floats(factors)
        return self._tables[growth]


def bend_of(fed: FeedForward) -> BendStruct:
    return BendStruct(fed.clamp, fed.slope, fed.up_offset)
