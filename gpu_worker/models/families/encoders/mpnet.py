"""MPNet: BERT whose scores have a bias by distance, one table for all layers. Positions begin at row 2."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families.encoders import bert
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import DistanceBias, ModelPlan

NAMES = replace(
    bert.NAMES,
    prefixes=("mpnet.", ""),
    distances="encoder.relative_attention_bias.weight",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out=("attention.attn.o",),
    mixer_norm="attention.LayerNorm",
)
_FIRST = 2
"""Whatever the padding token's id is."""


def mpnet(raw: JsonObject) -> ModelPlan:
    bias = DistanceBias()
    if (buckets := raw.get("relative_attention_num_buckets", bias.buckets)) != bias.buckets:
        limit = f"relative_attention_num_buckets must be {bias.buckets}"
        raise ModelError(f"config.json: {limit}, got {shown(buckets)}")
    return bert.encoder(raw, first_position=_FIRST, distances=bias)


FAMILIES = (
    Family(("MPNetModel", "MPNetForMaskedLM"), mpnet, NAMES),
    Family(
        ("MPNetForSequenceClassification",),
        bert.scoring(mpnet, "classifier.dense", "classifier.out_proj"),
        NAMES,
    ),
)
