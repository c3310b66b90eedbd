"""Gemma 3 and Gemma 4, the text parts. Both have norms before and behind attention and feed-forward, local layers
with a window and a rotation of their own, and scaled embeddings. Gemma 4's experts are not computed yet.

    Gemma 3   norms of 1 + w Gemma 4   values with a norm; wide heads in the full layers, some with values from
    keys; the last layers read the
              keys of earlier ones; the small models have per-layer inputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary, SideInput

NAMES = replace(
    reading.WRAPPED,
    mixer_out_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
)


def gemma3(outer: JsonObject) -> ModelPlan:
    raw = reading.text_part(outer)
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention must be false for a model that generates")
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
    turns = {kind: _rotary(raw, width, kind) for kind in (reading.FULL, reading.SLIDING)}
    kinds = _kinds(raw)
    mixers = [
        replace(mixer, rotary=turns[kind], window=window)
        for kind, window in zip(kinds, reading.windows(raw, windowed=True, default=kinds), strict=True)
    ]
    return _plan(raw, norm, tuple(mixers), (_inner(raw),) * len(mixers))


def gemma4(outer: JsonObject) -> ModelPlan:
    raw = reading.text_part(outer)
    if raw.get("enable_moe_block"):
        raise ModelError("config.json: enable_moe_block must be false: experts are not computed")
    norm = Norm(eps=reading.number(raw, "rms_norm_eps", 1e-6))
    kinds, shared = _kinds(raw), int(raw.get("num_kv_shared_layers") or 0)
    n, from_keys = len(kinds), bool(raw.get("attention_k_eq_v", False))
    window = reading.whole(raw, "sliding_window", 2**31 - 1, 512)
    mixers = []
    for i, kind in enumerate(kinds):
        full = kind == reading.FULL
        n_heads, n_kv_heads, width = _heads4(raw, i, full)
        others = [k for k in range(n - shared) if kinds[k] == kind] if i >= n - shared else []
        if i >= n - shared and not others:
            raise ModelError(f"config.json: num_kv_shared_layers leaves no {kind} for layer {i}, got {shared}")
        mixers.append(
            Attention(
                n_heads,
                n_kv_heads,
                width,
                scale=1.0,
                rotary=_rotary(raw, width, kind),
                window=0 if full else window,
                q_norm=norm,
                k_norm=norm,
                v_norm=replace(norm, weight=False),
                keys_of=others[-1] if others else None,
                values_are_keys=from_keys and full,
            )
        )
    wide = 2 if raw.get("use_double_wide_mlp") else 1
    inners = tuple(_inner(raw) * (wide if mixer.keys_of is not None else 1) for mixer in mixers)
    return _plan(raw, norm, tuple(mixers), inners, scalar=True, side=_side(raw, norm))


def _plan(
    raw: JsonObject,
    norm: Norm,
    mixers: tuple[Attention, ...],
    inners: tuple[int, ...],
    *,
    scalar: bool = False,
    side: SideInput | None = None,
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
        side=side,
    )


def _inner(raw: JsonObject) -> int:
    return reading.whole(raw, "intermediate_size", 2 * reading.MAX_WIDTH)


def _kinds(raw: JsonObject) -> tuple[str, ...]:
    every = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    pattern = [reading.SLIDING if (i + 1) % every else reading.FULL for i in range(reading.n_layers(raw))]
    return reading.layer_types(raw, pattern)


def _rotary(raw: JsonObject, width: int, kind: str) -> Rotary:
    """Rotations by kind of layer. In old files local layers have a base of their own and no scaling."""
    named = raw.get("rope_parameters")
    if isinstance(named, Mapping) and isinstance(named.get(kind), Mapping):
        return reading.rotary(raw, width, kind)
    if kind == reading.SLIDING:
        local = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
        return reading.rotary({**raw, "rope_scaling": None, "rope_parameters": local}, width)
    return reading.rotary({"rope_theta": 1_000_000.0, **raw}, width)


def _heads4(raw: JsonObject, i: int, full: bool) -> tuple[int, int, int]:
    """The heads of queries and of keys of a layer, and their width."""
    n_heads, n_kv_heads = reading.heads(raw)
    width = reading.head_dim(raw, default=256)
    given = raw.get("per_layer_config")
    if isinstance(given, Mapping):
        own = {int(layer): values for layer, values in given.items()}.get(i, {})
        return n_heads, int(own.get("num_key_value_heads", n_kv_heads)), int(own.get("head_dim", width))
    if not full:
        return n_heads, n_kv_heads, width
    more = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    return n_heads, int(more or n_kv_heads), int(raw.get("global_head_dim") or 512)


def _side(raw: JsonObject, norm: Norm) -> SideInput | None:
    width = int(raw.get("hidden_size_per_layer_input", 256) or 0)
    if not width:
        return None
    return SideInput(
        width=width,
        vocab_size=reading.whole(raw, "vocab_size_per_layer_input", MAX_VOCAB, 262_144),
        norm=norm,
        layer_norm=norm,
        activation=reading.activation(raw, ("gelu_tanh", "gelu", "silu"), key="hidden_activation"),
        embedding_factor=width**0.5,
        projection_factor=reading.whole(raw, "hidden_size", reading.MAX_WIDTH) ** -0.5,
        factor=2**-0.5,
    )


FAMILIES = (
    Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), gemma3, NAMES),
    Family(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), gemma4, NAMES),
)
