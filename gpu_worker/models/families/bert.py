"""Encoders with learned positions and norms after each addition: BERT, RoBERTa and XLM-RoBERTa. Positions of the
latter two begin after the row of the padding token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, architecture_of
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import (
    MAX_POSITION,
    Attention,
    Dense,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    Pooling,
)
from petiole.gpu_worker.models.weights.formats.declared import declared_by
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    prefixes=("bert.", "roberta.", ""),
    embedding="embeddings.word_embeddings.weight",
    embedding_norm="embeddings.LayerNorm",
    learned_positions="embeddings.position_embeddings.weight",
    token_types="embeddings.token_type_embeddings.weight",
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
        raise ModelError(f"config.json: position_embedding_type must be absolute, got {kind!r}")
    for key in ("is_decoder", "add_cross_attention"):
        if raw.get(key):
            raise ModelError(f"config.json: {key} must be false, got true")
    declared_by(raw)
    width = reading.head_dim(raw)
    norm = Norm("layer", eps=reading.number(raw, "layer_norm_eps", 1e-12), bias=True)
    heads, kv_heads = reading.heads(raw)
    mixer = Attention(heads, kv_heads, width, width**-0.5, mask="bidirectional", qkv_bias=True, out_bias=True)
    inner = reading.whole(raw, "intermediate_size", 2 * reading.MAX_WIDTH)
    fed = FeedForward(inner, reading.activation(raw, ("gelu", "gelu_tanh", "silu")), gated=False, bias=True)
    layer = Layer(mixer, fed, mixer_norm=norm, feed_forward_norm=norm, post_norm=True)
    positions = reading.whole(raw, "max_position_embeddings", MAX_POSITION, 512)
    first = int(reading.number(raw, "pad_token_id", 1)) + 1 if padded else 0
    if positions <= first:
        raise ModelError(f"config.json: max_position_embeddings must be above {first}, got {positions}")
    return ModelPlan(
        architecture=architecture_of(raw),
        vocab_size=reading.whole(raw, "vocab_size", MAX_VOCAB),
        hidden_size=reading.whole(raw, "hidden_size", reading.MAX_WIDTH),
        layers=(layer,) * reading.n_layers(raw),
        norm=None,
        max_position=positions - first,
        embedding_norm=norm,
        learned_positions=positions,
        first_position=first,
        token_types=reading.whole(raw, "type_vocab_size", MAX_VOCAB, 2),
        pooling=Pooling("mean"),
        dtype=reading.dtype(raw),
    )


roberta = partial(bert, padded=True)


def scoring(plan: Callable[[JsonObject], ModelPlan], first: str, last: str) -> Callable[[JsonObject], ModelPlan]:
    """With a head for scores on the first token: two products, of these names, with tanh between them."""

    def scored(raw: JsonObject) -> ModelPlan:
        made, labels = plan(raw), reading.labels(raw)
        width = made.hidden_size
        head = Dense(first, width, width, activation="tanh"), Dense(last, width, len(labels))
        return replace(made, pooling=Pooling("first", head, labels=labels, scale=reading.scale(raw)))

    return scored


FAMILIES = (
    Family(("BertModel",), bert, NAMES),
    Family(("RobertaModel", "XLMRobertaModel"), roberta, NAMES),
    Family(("BertForSequenceClassification",), scoring(bert, "bert.pooler.dense", "classifier"), NAMES),
    Family(
        ("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
        scoring(roberta, "classifier.dense", "classifier.out_proj"),
        NAMES,
    ),
)
