"""Llama 2 and 3, and models with their configuration. Of Llama 3.2 with images, layers of cross attention are
refused."""

from __future__ import annotations

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    biases = bool(raw.get("attention_bias", False))
    mixer = reading.usual_attention(raw, reading.head_dim(raw), qkv_bias=biases, out_bias=biases)
    sizes = reading.windows(raw, windowed=False)
    return reading.usual_plan(raw, reading.usual_layers(raw, mixer, sizes))


def mllama(outer: JsonObject) -> ModelPlan:
    raw = reading.text_part(outer)
    if crossed := raw.get("cross_attention_layers"):
        raise ModelError(
            f"config.json: cross_attention_layers must be empty: they are not computed, got {shown(crossed)}"
        )
    return plan(raw)


FAMILIES = (
    Family(("LlamaForCausalLM",), plan),
    Family(("MllamaForConditionalGeneration", "MllamaForCausalLM"), mllama, reading.WRAPPED),
)
