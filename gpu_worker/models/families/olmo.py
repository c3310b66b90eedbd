"""OLMo 2 and 3: norms stand only after attention and feed-forward, and over all heads at once. OLMo 3 has local
layers, whose rotation is never scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan, Norm, Rotary
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(mixer_out_norm="post_attention_layernorm", feed_forward_out_norm="post_feedforward_layernorm")


def olmo2(raw: JsonObject) -> ModelPlan:
    return _plan(raw, [reading.FULL] * reading.n_layers(raw))


def olmo3(raw: JsonObject) -> ModelPlan:
    return _plan(
        raw, [reading.FULL if (i + 1) % 4 == 0 else reading.SLIDING for i in range(reading.n_layers(raw))]
    )


def _plan(raw: JsonObject, kinds: list[str]) -> ModelPlan:
    raw = {"rms_norm_eps": 1e-5, **raw}
    norm, biases = Norm(eps=reading.number(raw, "rms_norm_eps", 1e-5)), bool(raw.get("attention_bias", False))
    width, of_layers = reading.head_dim(raw), reading.layer_types(raw, kinds)
    mixer = reading.usual_attention(
        raw, width, rotary=None, q_norm=norm, k_norm=norm, norm_whole=True, qkv_bias=biases, out_bias=biases
    )
    turns = {kind: _rotary(raw, width, kind) for kind in dict.fromkeys(of_layers)}
    sizes = reading.windows(raw, windowed=True, default=of_layers)
    layers = reading.usual_layers(
        raw, mixer, sizes, mixer_norm=None, feed_forward_norm=None, mixer_out_norm=norm, feed_forward_out_norm=norm
    )
    turned = (
        replace(layer, mixer=replace(layer.attention, rotary=turns[kind]))
        for layer, kind in zip(layers, of_layers, strict=True)
    )
    return reading.usual_plan(raw, tuple(turned))


def _rotary(raw: JsonObject, width: int, kind: str) -> Rotary:
    named = raw.get("rope_parameters")
    by_kind = isinstance(named, Mapping) and isinstance(named.get(kind), Mapping)
    if kind == reading.SLIDING and not by_kind:
        raw = {**raw, "rope_scaling": None}
    return reading.rotary(raw, width, kind)


FAMILIES = (Family(("Olmo2ForCausalLM",), olmo2, NAMES), Family(("Olmo3ForCausalLM",), olmo3, NAMES))
