"""ModernBERT: an encoder with rotations, gates, and local layers between full ones. The first layer has no norm
before its attention."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, architecture_of, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import (
    Attention,
    Dense,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    Pooling,
    PoolingKind,
)
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
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


def modernbert(raw: JsonObject) -> ModelPlan:
    declared_by(raw)
    width, norm = config_keys.head_dim(raw), _norm(raw)
    heads, kv_heads = config_keys.heads(raw)
    biases = bool(raw.get("attention_bias", False))
    mixer = Attention(heads, kv_heads, width, width**-0.5, mask="bidirectional", qkv_bias=biases, out_bias=biases)
    inner = config_keys.whole(raw, "intermediate_size", 2 * config_keys.MAX_WIDTH)
    act = config_keys.activation(raw, ("gelu", "gelu_tanh", "silu"), key="hidden_activation")
    layer = Layer(
        mixer, FeedForward(inner, act, bias=bool(raw.get("mlp_bias", False))), norm, feed_forward_norm=norm
    )
    every = config_keys.whole(raw, "global_attn_every_n_layers", config_keys.MAX_LAYERS, 3)
    pattern = [config_keys.SLIDING if i % every else config_keys.FULL for i in range(config_keys.n_layers(raw))]
    around = (
        config_keys.whole(raw, "local_attention", 2**31 - 1, 128) // 2 + 1
    )  # a position itself, and as many aside
    sees = {config_keys.FULL: 0, config_keys.SLIDING: around}
    layers = [
        replace(layer, mixer=replace(mixer, rotary=config_keys.rotary(raw, width, kind), window=sees[kind]))
        for kind in config_keys.layer_types(raw, pattern)
    ]
    layers[0] = replace(layers[0], mixer_norm=None)
    return ModelPlan(
        architecture=architecture_of(raw),
        vocab_size=config_keys.whole(raw, "vocab_size", MAX_VOCAB),
        hidden_size=config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH),
        layers=tuple(layers),
        norm=norm,
        max_position=config_keys.max_position(
            raw, *(layer.attention.rotary for layer in layers if layer.attention.rotary)
        ),
        embedding_norm=norm,
        pooling=config_keys.pooled(raw),
        dtype=config_keys.dtype(raw),
    )


def scoring(raw: JsonObject) -> ModelPlan:
    plan, labels = modernbert(raw), config_keys.labels(raw)
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
    pooled: PoolingKind = "mean" if kind == "mean" else "first"
    return replace(plan, pooling=Pooling((pooled,), head, labels=labels, scale=config_keys.scale(raw)))


def _norm(raw: JsonObject) -> Norm:
    return Norm("layer", eps=config_keys.number(raw, "norm_eps", 1e-5), bias=bool(raw.get("norm_bias", False)))


FAMILIES = (
    Family(("ModernBertModel",), modernbert, NAMES),
    Family(("ModernBertForSequenceClassification",), scoring, NAMES),
)
