"""ALBERT: BERT whose layers are one stored layer, or a few, again and again, behind narrow embeddings."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.encoders import bert
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan

NAMES = replace(
    bert.NAMES,
    prefixes=("albert.", ""),
    embedding_projection="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.{}.albert_layers.0.",
    qkv=("attention.query", "attention.key", "attention.value"),
    out=("attention.dense",),
    gate_up=("ffn",),
    down=("ffn_output",),
    mixer_norm="attention.LayerNorm",
    feed_forward_norm="full_layer_layer_norm",
)


def albert(raw: JsonObject) -> ModelPlan:
    plan = bert.bert({"hidden_act": "gelu_new", **raw})
    if (inner := raw.get("inner_group_num", 1)) != 1:
        raise ModelError(f"config.json: inner_group_num must be 1, got {shown(inner)}")
    groups = config_keys.whole(raw, "num_hidden_groups", plan.n_layers, 1)
    stored = tuple(int(i / (plan.n_layers / groups)) for i in range(plan.n_layers))
    size = config_keys.whole(raw, "embedding_size", config_keys.MAX_WIDTH, 128)  # projected at any width
    return replace(plan, embedding_size=size, stored_layers=stored)


FAMILIES = (
    Family(("AlbertModel", "AlbertForMaskedLM"), albert, NAMES),
    Family(("AlbertForSequenceClassification",), bert.scoring(albert, "albert.pooler", "classifier"), NAMES),
)
