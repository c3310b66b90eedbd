"""ModernBERT: an encoder with rotations, gates, and local layers between full ones. The first layer has no norm
before its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, architecture_of, shown
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import (
    Attention,
    Dense,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    Pooling,
    Rotary,
)
from petiole.gpu_worker.models.weights.formats.declared import declared_by
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    embedding="embeddings.tok_embeddings.weight",
    embedding_norm="embeddings.norm",
    norm="final_norm",
    qkv=("attn.Wqkv",),
    out=("attn.Wo",),
    gate_up=("mlp.Wi",),
    down=("mlp.Wo",),
    mixer_norm="attn_norm",
    feed_forward_norm="mlp_norm",
)
_THETAS = {reading.FULL: ("global_rope_theta", 160_000.0), reading.SLIDING: ("local_rope_theta", 10_000.0)}


def modernbert(raw: JsonObject) -> ModelPlan:
    declared_by(raw)
    width, norm = reading.head_dim(raw), _norm(raw)
    heads, kv_heads = reading.heads(raw)
    biases = bool(raw.get("attention_bias", False))
    mixer = Attention(heads, kv_heads, width, width**-0.5, mask="bidirectional", qkv_bias=biases, out_bias=biases)
    inner = reading.whole(raw, "intermediate_size", 2 * reading.MAX_WIDTH)
    act = reading.activation(raw, ("gelu", "gelu_tanh", "silu"), key="hidden_activation")
    layer = Layer(
        mixer, FeedForward(inner, act, bias=bool(raw.get("mlp_bias", False))), norm, feed_forward_norm=norm
    )
    every = reading.whole(raw, "global_attn_every_n_layers", reading.MAX_LAYERS, 3)
    pattern = [reading.SLIDING if i % every else reading.FULL for i in range(reading.n_layers(raw))]
    around = reading.whole(raw, "local_attention", 2**31 - 1, 128) // 2 + 1  # a position itself, and as many aside
    sees = {reading.FULL: 0, reading.SLIDING: around}
    layers = [
        replace(layer, mixer=replace(mixer, rotary=_rotary(raw, width, kind), window=sees[kind]))
        for kind in reading.layer_types(raw, pattern)
    ]
    layers[0] = replace(layers[0], mixer_norm=None)
    return ModelPlan(
        architecture=architecture_of(raw),
        vocab_size=reading.whole(raw, "vocab_size", MAX_VOCAB),
        hidden_size=reading.whole(raw, "hidden_size", reading.MAX_WIDTH),
        layers=tuple(layers),
        norm=norm,
        max_position=reading.max_position(
            raw, *(layer.attention.rotary for layer in layers if layer.attention.rotary)
        ),
        embedding_norm=norm,
        pooling=Pooling("mean"),
        dtype=reading.dtype(raw),
    )


def scoring(raw: JsonObject) -> ModelPlan:
    plan, labels = modernbert(raw), reading.labels(raw)
    kind = raw.get("classifier_pooling") or "cls"
    if kind not in ("cls", "mean"):
        raise ModelError(f"config.json: classifier_pooling must be cls or mean, got {shown(kind)}")
    if (act := raw.get("classifier_activation") or "gelu") != "gelu":
        raise ModelError(f"config.json: classifier_activation must be gelu, got {shown(act)}")
    width = plan.hidden_size
    dense = Dense(
        "head.dense", width, width, bool(raw.get("classifier_bias", False)), "gelu", _norm(raw), "head.norm"
    )
    head = dense, Dense("classifier", width, len(labels))
    pooled: Literal["mean", "first"] = "mean" if kind == "mean" else "first"
    return replace(plan, pooling=Pooling(pooled, head, labels=labels, scale=reading.scale(raw)))


def _norm(raw: JsonObject) -> Norm:
    return Norm("layer", eps=reading.number(raw, "norm_eps", 1e-5), bias=bool(raw.get("norm_bias", False)))


def _rotary(raw: JsonObject, width: int, kind: str) -> Rotary:
    """By kind of layer; in old files under names of their own."""
    name, default = _THETAS[kind]
    named = raw.get("rope_parameters")
    if isinstance(named, Mapping) and isinstance(named.get(kind), Mapping):
        return reading.rotary({"rope_theta": default, **raw}, width, kind)
    return reading.rotary({**raw, "rope_theta": raw.get(name) or default}, width)


FAMILIES = (
    Family(("ModernBertModel",), modernbert, NAMES),
    Family(("ModernBertForSequenceClassification",), scoring, NAMES),
)
