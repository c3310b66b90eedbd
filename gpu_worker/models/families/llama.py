"""Llama 2 and 3, and models with their configuration."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    biases = bool(raw.get("attention_bias", False))
    mixer = reading.usual_attention(raw, reading.head_dim(raw), qkv_bias=biases, out_bias=biases)
    sizes = reading.windows(raw, windowed=False)
    return reading.usual_plan(raw, reading.usual_layers(raw, mixer, sizes))


FAMILIES = (Family(("LlamaForCausalLM",), plan),)
