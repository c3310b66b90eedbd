"""Granite 4: Granite 3 whose layers attend or are Mamba-2. Heads are rotated only if the configuration says so,
and every position takes a shared feed-forward, with experts beside it or none."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.decoders import granite
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.families.hybrids.mamba import SCANNING, checked
from petiole.gpu_worker.models.plan import Experts, FeedForward, Layer, Mamba2, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Fused, Names, RecurrentNames

ATTENDING = ("attention", config_keys.FULL)

NAMES = Names(
    gate_up=("shared_mlp.input_linear",),
    down=("shared_mlp.output_linear",),
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}.",
    fused=Fused(gate_up="input_linear", down="output_linear"),
    recurrent=RecurrentNames(
        inputs=("mamba.in_proj",),
        convolution="mamba.conv1d",
        out="mamba.out_proj",
        decay="mamba.A_log",
        bias="mamba.dt_bias",
        norm="mamba.norm",
        skip="mamba.D",
    ),
)

IN_TWO = replace(NAMES, gate_up=("shared_mlp.gate_proj", "shared_mlp.up_proj"))
"""Gate and up of GGUF files."""


def plan(raw: JsonObject) -> ModelPlan:
    n = config_keys.n_layers(raw)
    kinds = config_keys.layer_types(raw, [SCANNING[0]] * n, (*ATTENDING, *SCANNING))
    shared = config_keys.whole(raw, "shared_intermediate_size", 2 * config_keys.MAX_WIDTH, 1024)
    made = granite.plan({**raw, "layer_types": [config_keys.FULL] * n, "intermediate_size": shared})
    net, experts = _mamba2(raw) if set(kinds) & set(SCANNING) else None, _experts(raw)
    turned = raw.get("position_embedding_type") == "rope"

    def layer(kind: str, of_granite: Layer) -> Layer:
        attention = of_granite.attention
        mixer = net if kind in SCANNING else attention if turned else replace(attention, rotary=None)
        assert mixer is not None
        return replace(of_granite, mixer=mixer, experts=experts)

    return replace(made, layers=tuple(map(layer, kinds, made.layers)))


def _experts(raw: JsonObject) -> Experts | None:
    if not raw.get("num_local_experts", 8):
        return None
    router = config_keys.router({"num_experts_per_tok": 2, **raw}, "num_local_experts", score="chosen")
    return Experts(router, FeedForward(config_keys.inner(raw), config_keys.activation(raw, ("silu",))))


def _mamba2(raw: JsonObject) -> Mamba2:
    def size(key: str, default: int) -> int:
        return config_keys.whole(raw, f"mamba_{key}", config_keys.MAX_WIDTH, default)

    inner = size("expand", 2) * config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH)
    heads, groups = size("n_heads", 128), size("n_groups", 1)
    head_dim = inner // heads if raw.get("mamba_d_head", "auto") == "auto" else size("d_head", 1)
    if heads * head_dim != inner:
        limit = f"must be mamba_expand times hidden_size, {inner}, over mamba_n_heads, {heads}"
        raise ModelError(f"config.json: mamba_d_head {limit}, got {head_dim}")
    mixer = Mamba2(
        heads=heads,
        head_dim=head_dim,
        state=size("d_state", 256),
        groups=groups,
        kernel=size("d_conv", 4),
        norm=Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6)),
        convolution_bias=bool(raw.get("mamba_conv_bias", True)),
        bias=bool(raw.get("mamba_proj_bias", False)),
    )
    return checked(raw, mixer, groups="mamba_n_groups")


FAMILIES = (Family(("GraniteMoeHybridForCausalLM",), plan, replace(NAMES, instead=(IN_TWO,))),)
