"""Gemma 3, the text part, and EmbeddingGemma: norms of 1 + w before and after attention and feed-forward, local
layers with a window and a rotation of their own, scaled embeddings. Gemma 4 shares much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import (
    Attention,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    PerLayerInput,
    Pooling,
    Rotary,
)

NAMES = replace(
    reading.WRAPPED,
    mixer_out_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
)


def gemma3(outer: JsonObject) -> ModelPlan:
    raw = reading.text_part(outer)
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention must be false for a model that generates")
    return _plan(raw)


def embedding_gemma(raw: JsonObject) -> ModelPlan:
    """Without a head. All positions see each other, but for layers with a window: as many positions on each side
    as half of it, rounded down."""
    plan = replace(_plan(raw), pooling=Pooling("mean"))
    if not raw.get("use_bidirectional_attention"):
        return plan

    def around(mixer: Attention) -> Attention:
        window = mixer.window // 2 + 1 if mixer.window else 0  # a position itself, and as many aside
        return replace(mixer, mask="bidirectional", window=window)

    return replace(plan, layers=tuple(replace(layer, mixer=around(layer.attention)) for layer in plan.layers))


def _plan(raw: JsonObject) -> ModelPlan:
    width, norm = (
        reading.head_dim(raw, default=256),
        Norm(eps=reading.number(raw, "rms_norm_eps", 1e-6), offset=1.0),
    )
    biases = bool(raw.get("attention_bias", False))
    mixer = reading.usual_attention(
        raw,
        width,
        rotary=None,
        scale=reading.number(raw, "query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        q_norm=norm,
        k_norm=norm,
        qkv_bias=biases,
        out_bias=biases,
        softcap=reading.number(raw, "attn_logit_softcapping", 0.0),
    )
    turns = {kind: rotary_of(raw, width, kind) for kind in (reading.FULL, reading.SLIDING)}
    kinds = kinds_of(raw)
    mixers = [
        replace(mixer, rotary=turns[kind], window=window)
        for kind, window in zip(kinds, reading.windows(raw, windowed=True, default=kinds), strict=True)
    ]
    return plan_of(raw, norm, tuple(mixers), (reading.inner(raw),) * len(mixers))


def plan_of(
    raw: JsonObject,
    norm: Norm,
    mixers: tuple[Attention, ...],
    inners: tuple[int, ...],
    *,
    scalar: bool = False,
    per_layer: PerLayerInput | None = None,
) -> ModelPlan:
    act = reading.activation(raw, ("gelu_tanh", "gelu", "silu"), key="hidden_activation")
    layers = tuple(
        Layer(mixer, FeedForward(inner, act), norm, norm, norm, norm, scalar=scalar)
        for mixer, inner in zip(mixers, inners, strict=True)
    )
    return reading.usual_plan(
        {"tie_word_embeddings": True, **raw},
        layers,
        norm=norm,
        embedding_factor=reading.whole(raw, "hidden_size", reading.MAX_WIDTH) ** 0.5,
        logits_softcap=reading.number(raw, "final_logit_softcapping", 0.0),
        per_layer=per_layer,
    )


def kinds_of(raw: JsonObject) -> tuple[str, ...]:
    every = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    pattern = [reading.SLIDING if (i + 1) % every else reading.FULL for i in range(reading.n_layers(raw))]
    return reading.layer_types(raw, pattern)


def rotary_of(raw: JsonObject, width: int, kind: str) -> Rotary:
    """Rotations by kind of layer. In old files local layers have a base of their own and no scaling."""
    named = raw.get("rope_parameters")
    if isinstance(named, Mapping) and isinstance(named.get(kind), Mapping):
        return reading.rotary(raw, width, kind)
    if kind == reading.SLIDING:
        local = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
        return reading.rotary({**raw, "rope_scaling": None, "rope_parameters": local}, width)
    return reading.rotary({"rope_theta": 1_000_000.0, **raw}, width)


FAMILIES = (
    Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), gemma3, NAMES),
    Family(("Gemma3TextModel",), embedding_gemma, NAMES),
)
