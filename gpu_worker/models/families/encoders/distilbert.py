"""DistilBERT: BERT without token types, under names of its own."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families.encoders import bert
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan

NAMES = replace(
    bert.NAMES,
    prefixes=("distilbert.", ""),
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out=("attention.out_lin",),
    gate_up=("ffn.lin1",),
    down=("ffn.lin2",),
    mixer_norm="sa_layer_norm",
    feed_forward_norm="output_layer_norm",
)
_KEYS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
}


def distilbert(raw: JsonObject) -> ModelPlan:
    usual = {key: raw[own] for key, own in _KEYS.items() if own in raw}
    return bert.encoder({**raw, **usual, "layer_norm_eps": 1e-12}, act="activation")


FAMILIES = (
    Family(("DistilBertModel", "DistilBertForMaskedLM"), distilbert, NAMES),
    Family(
        ("DistilBertForSequenceClassification",),
        bert.scoring(distilbert, "pre_classifier", "classifier", "relu"),
        NAMES,
    ),
)
