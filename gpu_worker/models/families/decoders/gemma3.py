"""Gemma 3 and EmbeddingGemma: norms of 1 + w before and after attention and feed-forward, local
layers with a window and a rotation of their own, scaled embeddings. Gemma 4 shares much of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys, towers
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import (
    MAX_POSITION,
    Attention,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    PerLayerInput,
)
from petiole.gpu_worker.models.vision.reading import GEMMA3 as GEMMA3_SIGHT, with_eyes

NAMES = replace(
    config_keys.WRAPPED,
    mixer_out_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
)


def seeing(outer: JsonObject) -> ModelPlan:
    """The positions of a picture see each other in all layers."""
    return ahead_in(gemma3(outer), lambda mixer: True)


def ahead_in(plan: ModelPlan, chosen: Callable[[Attention], bool]) -> ModelPlan:
    """With layers in which the positions of a picture see each other."""
    layers = (
        replace(layer, mixer=replace(layer.attention, mask="prefix")) if chosen(layer.attention) else layer
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def gemma3(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention must be false for a model that generates")
    return _plan(raw)


def embedding_gemma(raw: JsonObject) -> ModelPlan:
    """Without a head. All positions see each other, but for layers with a window: as many positions on each side
    as half of it, rounded down."""
    plan = replace(_plan(raw), pooling=config_keys.pooled(raw))
    if not raw.get("use_bidirectional_attention"):
        return plan

    def around(mixer: Attention) -> Attention:
        window = mixer.window // 2 + 1 if mixer.window else 0  # a position itself, and as many aside
        return replace(mixer, mask="bidirectional", window=window)

    return replace(plan, layers=tuple(replace(layer, mixer=around(layer.attention)) for layer in plan.layers))


def _plan(raw: JsonObject) -> ModelPlan:
    width, norm = (
        config_keys.head_dim(raw),
        Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6), offset=1.0),
    )
    biases = bool(raw.get("attention_bias", False))
    mixer = config_keys.usual_attention(
        raw,
        width,
        rotary=None,
        scale=config_keys.number(raw, "query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        q_norm=norm,
        k_norm=norm,
        qkv_bias=biases,
        out_bias=biases,
    )
    turns = {kind: config_keys.rotary(raw, width, kind) for kind in (config_keys.FULL, config_keys.SLIDING)}
    kinds = kinds_of(raw)
    mixers = [
        replace(mixer, rotary=turns[kind], window=window)
        for kind, window in zip(kinds, config_keys.windows(raw, windowed=True, default=kinds), strict=True)
    ]
    return plan_of(raw, norm, tuple(mixers), (config_keys.inner(raw),) * len(mixers))


def plan_of(
    raw: JsonObject,
    norm: Norm,
    mixers: tuple[Attention, ...],
    inners: tuple[int, ...],
    *,
    scalar: bool = False,
    per_layer: PerLayerInput | None = None,
) -> ModelPlan:
    act = config_keys.activation(raw, ("gelu_tanh", "gelu", "silu"), key="hidden_activation")
    layers = tuple(
        Layer(mixer, FeedForward(inner, act), norm, norm, norm, norm, scalar=scalar)
        for mixer, inner in zip(mixers, inners, strict=True)
    )
    return config_keys.usual_plan(
        raw,
        layers,
        norm=norm,
        embedding_factor=config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH) ** 0.5,
        logits_softcap=config_keys.number(raw, "final_logit_softcapping", 0.0),
        per_layer=per_layer,
    )


def kinds_of(raw: JsonObject) -> tuple[str, ...]:
    every = config_keys.whole(raw, "sliding_window_pattern", MAX_POSITION, 6)
    pattern = [
        config_keys.SLIDING if (i + 1) % every else config_keys.FULL for i in range(config_keys.n_layers(raw))
    ]
    return config_keys.layer_types(raw, pattern)


SEEING = replace(
    NAMES,
    tower=(
        *(f"{of}vision_tower.{tower}" for of in ("model.", "") for tower in ("vision_model.", "")),
        *(f"{of}{beside}." for of in ("model.", "") for beside in ("multi_modal_projector", "embed_vision")),
    ),
)
"""With the names of a tower, and of what projects its features."""

FAMILIES = (
    Family(("Gemma3ForCausalLM",), gemma3, NAMES),
    Family(("Gemma3ForConditionalGeneration",), seeing, SEEING, with_eyes(towers.gemma3, GEMMA3_SIGHT), sees=True),
    Family(("Gemma3TextModel",), embedding_gemma, NAMES),
)
