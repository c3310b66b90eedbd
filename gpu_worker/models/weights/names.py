"""Where a checkpoint keeps the tensors of a plan's parts. Families name what differs from Llama's names.

A part that one product computes may be stored in several layers, or in one: queries, keys and values are one name
or three, gate and up one name or two. Names of layers and norms are without `.weight` and `.bias`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

from petiole.gpu_worker.models.plan import Attention, Latent, Layer, ModelPlan

LinearName = Literal["qkv", "out", "gate_up", "down"]
"""The products of attention and of a feed-forward, which adapters may change."""

LINEARS: tuple[LinearName, ...] = ("qkv", "out", "gate_up", "down")


WEIGHTS = (".weight", ".weight_packed", ".qweight")
"""The tensor with a layer's weights, plain or quantised, has one of these after the layer's name."""


class Tensors(Protocol):
    """The names of a checkpoint's tensors."""

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Fused:
    """How a checkpoint stores the experts of a layer in one tensor, where it does: [experts, outputs, inputs], or
    input_major: [experts, inputs, outputs]. interleaved: outputs of gate and up take turns; else gate comes
    first. gate_up, down: the names of the tensors, in the place of `experts.` and what follows."""

    input_major: bool = False
    interleaved: bool = False
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """The parts of a mixer that keeps a state. inputs, gates: of one stored layer or of two."""

    inputs: tuple[str, ...]
    convolution: str
    out: str
    gates: tuple[str, ...] = ()
    decay: str = ""
    bias: str = ""
    norm: str = ""
    skip: str = ""


DELTA_NET = RecurrentNames(
    inputs=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    convolution="linear_attn.conv1d",
    out="linear_attn.out_proj",
    gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    decay="linear_attn.A_log",
    bias="linear_attn.dt_bias",
    norm="linear_attn.norm",
)


@dataclass(frozen=True, slots=True)
class LatentNames:
    """The parts of attention over latents. queries: of queries that are one product; query_down, query_norm,
    query_up: of others. up: of keys and values, from a latent; or keys, values: the same in two, in the form of
    `LatentWeights`, where a checkpoint has them."""

    queries: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"
    keys: str = "self_attn.k_b_proj"
    values: str = "self_attn.v_b_proj"

    def first(self, plan: Latent) -> tuple[str, str]:
        """The stored layers of the first product."""
        return (self.query_down if plan.query_rank else self.queries), self.down


@dataclass(frozen=True, slots=True)
class DraftingNames:
    """The parts of a head that drafts, beside its layer, which is layer 0 behind the prefix."""

    prefix: str = "mtp."
    join: str = "fc"
    token_norm: str = "pre_fc_norm_embedding"
    hidden_norm: str = "pre_fc_norm_hidden"
    norm: str = "norm"


@dataclass(frozen=True, slots=True)
class Names:
    """prefixes: of all tensors but the head; the first that fits the checkpoint counts. heads: whole names, of
    which the first that exists counts. layer: before the names of layer {}. apart: a mixer and its feed-forward
    are stored as a layer each, one after the other. turned: how the names of layers end whose weights are stored
    as [inputs, outputs]. tower: prefixes of what encodes pictures, where a family reads it. instead: other ways to
    store the products of layers."""

    prefixes: tuple[str, ...] = ("model.", "")
    heads: tuple[str, ...] = ("lm_head",)
    tower: tuple[str, ...] = ()
    embedding: str = "embed_tokens.weight"
    embedding_norm: str = "embedding_norm"
    learned_positions: str = "embed_positions.weight"
    token_types: str = "token_type_embeddings.weight"
    embedding_projection: str = "embedding_projection"
    distances: str = "distances"
    distances_norm: str = "distances_norm"
    distance_keys: str = "distance_keys"
    distance_queries: str = "distance_queries"
    norm: str = "norm"
    per_layer_table: str = "embed_tokens_per_layer.weight"
    per_layer_projection: str = "per_layer_model_projection"
    per_layer_norm: str = "per_layer_projection_norm"
    layer: str = "layers.{}."
    apart: bool = False
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: tuple[str, ...] = ("self_attn.o_proj",)
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    v_norm: str = "self_attn.v_norm"
    sinks: str = "self_attn.sinks"
    latent: LatentNames = LatentNames()
    recurrent: RecurrentNames = DELTA_NET
    mixer_norm: str = "input_layernorm"
    mixer_out_norm: str = "post_attention_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_out_norm: str = "post_feedforward_layernorm"
    scalar: str = "layer_scalar"
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    fused: Fused = Fused()
    turned: tuple[str, ...] = ()
    router: str = "mlp.gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    dense_out_norm: str = "post_feedforward_layernorm_1"
    dense_gate: str = "mlp.shared_expert_gate"
    beside_gate_up: tuple[str, ...] = ()
    beside_down: tuple[str, ...] = ()
    per_layer_gate: str = "per_layer_input_gate"
    per_layer_out: str = "per_layer_projection"
    per_layer_out_norm: str = "post_per_layer_input_norm"
    drafting: DraftingNames = DraftingNames()
    instead: tuple[Names, ...] = ()

    def stored_in(self, tensors: Iterable[str]) -> Names:
        """The way in which a checkpoint with these tensors stores the products: the first of which it has all."""
        there = [".".join(name.split(".")[-3:-1]) for name in tensors] if self.instead else []
        ways = (self, *self.instead)
        return next((way for way in ways if {*way.qkv, *way.gate_up}.issubset(there)), self)

    def prefix_in(self, tensors: Tensors) -> str:
        """The prefix of this checkpoint."""
        return next((p for p in self.prefixes if p + self.embedding in tensors), self.prefixes[0])

    def head_in(self, tensors: Tensors) -> str:
        """The stored head, plain or quantised."""
        stored = (name for name in self.heads if any(name + weight in tensors for weight in WEIGHTS))
        return next(stored, self.heads[0])

    def places(self, plan: ModelPlan) -> Iterator[tuple[str, str]]:
        """What stands before the names of each layer's mixer, and of its feed-forward."""
        if not self.apart:
            yield from ((self.layer.format(i),) * 2 for i in plan.stored_layers or range(plan.n_layers))
            return
        lengths = accumulate((1 + layer.feeds for layer in plan.layers), initial=0)
        yield from (
            (self.layer.format(i), self.layer.format(i + 1)) for i, _ in zip(lengths, plan.layers, strict=False)
        )

    def stored(self, linear: LinearName, layer: Layer, inputs: int) -> StoredLinear | None:
        """How one of a layer's products is stored; None: the layer has no such product. inputs: the width of the
        model."""
        mixer, feed_forward = layer.mixer, layer.feed_forward
        if linear in ("qkv", "out"):
            if not isinstance(mixer, Attention):
                return None
            if linear == "qkv":
                names = self.qkv if mixer.latent is None else self.latent.first(mixer.latent)
                return StoredLinear.of(names, mixer.qkv_sizes, inputs)
            return StoredLinear.of(self.out, (inputs,), mixer.out_size)
        if feed_forward is None:
            return None
        beside = layer.experts is not None
        if linear == "gate_up":
            names = (beside and self.beside_gate_up) or self.gate_up
            return StoredLinear.of(names, feed_forward.up_sizes, inputs)
        return StoredLinear.of((beside and self.beside_down) or self.down, (inputs,), feed_forward.inner)

    def linears(self, layer: Layer, inputs: int) -> Iterator[tuple[LinearName, StoredLinear]]:
        """The products that a layer has, without those of experts."""
        found = ((name, self.stored(name, layer, inputs)) for name in LINEARS)
        return ((name, stored) for name, stored in found if stored is not None)


LLAMA = Names()


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A product of `inputs` whose outputs are `parts` one after the other, in stored layers `names` with `sizes`
    outputs. Either each part has a name, or one name has all parts."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    inputs: int

    @staticmethod
    def of(names: Sequence[str], parts: tuple[int, ...], inputs: int) -> StoredLinear:
        """names: of one layer that has all parts, or of queries, keys and values, or of gate and up. A plan
        without values of its own, or keys, takes the first of them; one without a gate the last of two."""
        if len(names) == 1:
            return StoredLinear(tuple(names), (sum(parts),), parts, inputs)
        without_gate = len(names) == 2 and len(parts) == 1
        return StoredLinear(tuple(names[-1:] if without_gate else names[: len(parts)]), parts, parts, inputs)
