"""DeBERTa 2 and 3: BERT whose scores have products with vectors of distances. Version 3 has no positions beside
them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.encoders import bert
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import MAX_POSITION, Disentangled, ModelPlan, Norm

NAMES = replace(
    bert.NAMES,
    prefixes=("deberta.", ""),
    distances="encoder.rel_embeddings.weight",
    distances_norm="encoder.LayerNorm",
    distance_keys="attention.self.pos_key_proj",
    distance_queries="attention.self.pos_query_proj",
    qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
)


def deberta(raw: JsonObject) -> ModelPlan:
    raw = {"layer_norm_eps": 1e-7, **raw}
    width = config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH)
    for key, only in (("conv_kernel_size", 0), ("embedding_size", width), ("attention_head_size", None)):
        if raw.get(key, only) != only:
            raise ModelError(f"config.json: {key} must be {only} or missing, got {shown(raw[key])}")
    types = int(config_keys.number(raw, "type_vocab_size", 0))
    if types > MAX_VOCAB:
        raise ModelError(f"config.json: type_vocab_size must be at most {MAX_VOCAB}, got {types}")
    found = _distances(raw) if raw.get("relative_attention", False) else None
    plan = bert.encoder(raw, distances=found, token_types=types)
    terms = 1 if found is None else 1 + found.keys + found.queries
    layers = tuple(
        replace(layer, mixer=replace(layer.attention, scale=(layer.attention.head_dim * terms) ** -0.5))
        for layer in plan.layers
    )
    return replace(
        plan, layers=layers, learned_positions=plan.max_position if raw.get("position_biased_input", True) else 0
    )


def _distances(raw: JsonObject) -> Disentangled:
    span, buckets = (
        config_keys.whole({key: raw.get(key) or -1}, key, MAX_POSITION, low=-1)
        for key in ("max_relative_positions", "position_buckets")
    )
    longest = config_keys.whole(raw, "max_position_embeddings", MAX_POSITION, 512)
    given: Any = raw.get("pos_att_type") or []
    listed = given.lower().split("|") if isinstance(given, str) else given
    kinds = {str(kind).strip() for kind in (listed if isinstance(listed, list) else [listed])}
    if not kinds <= {"c2p", "p2c"}:
        raise ModelError(f"config.json: pos_att_type must be of c2p and p2c, got {shown(given)}")
    normed = "layer_norm" in str(raw.get("norm_rel_ebd", "none")).lower()
    return Disentangled(
        span=config_keys.whole({"span": span if span >= 1 else longest}, "span", MAX_POSITION),
        buckets=max(buckets, 0),
        keys="c2p" in kinds,
        queries="p2c" in kinds,
        shared=bool(raw.get("share_att_key", False)),
        norm=Norm("layer", eps=config_keys.number(raw, "layer_norm_eps", 1e-7), bias=True) if normed else None,
    )


def scoring(raw: JsonObject) -> ModelPlan:
    if (act := raw.get("pooler_hidden_act") or "gelu") != "gelu":
        raise ModelError(f"config.json: pooler_hidden_act must be gelu, got {shown(act)}")
    return bert.scoring(deberta, "pooler.dense", "classifier", "gelu")(raw)


FAMILIES = (
    Family(("DebertaV2Model", "DebertaV2ForMaskedLM"), deberta, NAMES),
    Family(("DebertaV2ForSequenceClassification",), scoring, NAMES),
)
