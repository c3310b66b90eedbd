"""Mistral 7B and its successors of the same configuration: no biases, every layer with a window if there is
one."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    mixer = reading.usual_attention(raw, reading.head_dim(raw))
    return reading.usual_plan(raw, reading.usual_layers(raw, mixer, reading.windows(raw, windowed=True)))


FAMILIES = (Family(("MistralForCausalLM",), plan),)
