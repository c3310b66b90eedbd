"""Encoders with learned positions and norms after each addition: BERT and ELECTRA; RoBERTa, XLM-RoBERTa and
CamemBERT, whose positions begin after the row of the padding token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, architecture_of, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import (
    MAX_POSITION,
    Activation,
    Attention,
    Dense,
    Disentangled,
    DistanceBias,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    Pooling,
)
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    prefixes=("bert.", "roberta.", "electra.", ""),
    embedding="embeddings.word_embeddings.weight",
    embedding_norm="embeddings.LayerNorm",
    learned_positions="embeddings.position_embeddings.weight",
    token_types="embeddings.token_type_embeddings.weight",
    embedding_projection="embeddings_project",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out=("attention.output.dense",),
    gate_up=("intermediate.dense",),
    down=("output.dense",),
    mixer_norm="attention.output.LayerNorm",
    feed_forward_norm="output.LayerNorm",
)


def bert(raw: JsonObject, *, padded: bool = False) -> ModelPlan:
    """padded: whether the positions begin after the padding token's row."""
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(f"config.json: position_embedding_type must be absolute, got {shown(kind)}")
    for key in ("is_decoder", "add_cross_attention"):
        if raw.get(key):
            raise ModelError(f"config.json: {key} must be false, got true")
    first = int(config_keys.number(raw, "pad_token_id", 1)) + 1 if padded else 0
    types = config_keys.whole(raw, "type_vocab_size", MAX_VOCAB, 2)
    return encoder(raw, first_position=first, token_types=types)


def encoder(
    raw: JsonObject,
    *,
    first_position: int = 0,
    distances: DistanceBias | Disentangled | None = None,
    act: str = "hidden_act",
    **more: Any,
) -> ModelPlan:
    """Layers as BERT has them. act: the key of the activation. more: fields of the plan."""
    declared_by(raw)
    width = config_keys.head_dim(raw)
    norm = Norm("layer", eps=config_keys.number(raw, "layer_norm_eps", 1e-12), bias=True)
    heads, kv_heads = config_keys.heads(raw)
    mixer = Attention(
        heads,
        kv_heads,
        width,
        width**-0.5,
        mask="bidirectional",
        qkv_bias=True,
        out_bias=True,
        distances=distances,
    )
    known: tuple[Activation, ...] = ("gelu", "gelu_tanh", "silu", "relu")
    fed = FeedForward(config_keys.inner(raw), config_keys.activation(raw, known, key=act), gated=False, bias=True)
    layer = Layer(mixer, fed, mixer_norm=norm, feed_forward_norm=norm, post_norm=True)
    positions = config_keys.whole(raw, "max_position_embeddings", MAX_POSITION, 512)
    if positions <= first_position:
        raise ModelError(f"config.json: max_position_embeddings must be above {first_position}, got {positions}")
    parts: dict[str, Any] = {
        "architecture": architecture_of(raw),
        "vocab_size": config_keys.whole(raw, "vocab_size", MAX_VOCAB),
        "hidden_size": config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH),
        "layers": (layer,) * config_keys.n_layers(raw),
        "norm": None,
        "max_position": positions - first_position,
        "embedding_norm": norm,
        "learned_positions": positions,
        "first_position": first_position,
        "pooling": config_keys.pooled(raw),
        "dtype": config_keys.dtype(raw),
    }
    return ModelPlan(**parts | more)


def electra(raw: JsonObject) -> ModelPlan:
    """The small ones have embeddings that are narrower than their layers."""
    plan = bert(raw)
    return replace(plan, embedding_size=narrow(raw, plan))


def narrow(raw: JsonObject, plan: ModelPlan) -> int:
    """The width of the embeddings, if it is not that of the layers; else 0."""
    size = config_keys.whole(raw, "embedding_size", config_keys.MAX_WIDTH, 128)
    return 0 if size == plan.hidden_size else size


roberta = partial(bert, padded=True)

HeadActivation = Literal["none", "tanh", "gelu", "relu"]


def scoring(
    plan: Callable[[JsonObject], ModelPlan], first: str, last: str, act: HeadActivation = "tanh"
) -> Callable[[JsonObject], ModelPlan]:
    """With a head for scores on the first token: two products, of these names, with an activation between them."""

    def scored(raw: JsonObject) -> ModelPlan:
        made, labels = plan(raw), config_keys.labels(raw)
        width = made.hidden_size
        head = Dense(first, width, width, activation=act), Dense(last, width, len(labels))
        return replace(made, pooling=Pooling(("first",), head, labels=labels, scale=config_keys.scale(raw)))

    return scored


_ROBERTA = ("Roberta", "XLMRoberta", "Camembert")

FAMILIES = (
    Family(("BertModel", "BertForMaskedLM"), bert, NAMES),
    Family(tuple(f"{name}{part}" for name in _ROBERTA for part in ("Model", "ForMaskedLM")), roberta, NAMES),
    Family(("ElectraModel",), electra, NAMES),
    Family(("BertForSequenceClassification",), scoring(bert, "bert.pooler.dense", "classifier"), NAMES),
    Family(
        tuple(f"{name}ForSequenceClassification" for name in _ROBERTA),
        scoring(roberta, "classifier.dense", "classifier.out_proj"),
        NAMES,
    ),
    Family(
        ("ElectraForSequenceClassification",),
        scoring(electra, "classifier.dense", "classifier.out_proj", "gelu"),
        NAMES,
    ),
)
