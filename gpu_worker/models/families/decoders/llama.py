"""Llama 2 and 3, and models with their configuration. Of Llama 3.2 with images, layers of cross attention are
refused."""

from __future__ import annotations

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    biases = bool(raw.get("attention_bias", False))
    mixer = config_keys.usual_attention(raw, config_keys.head_dim(raw), qkv_bias=biases, out_bias=biases)
    sizes = config_keys.windows(raw, windowed=False)
    return config_keys.usual_plan(raw, config_keys.usual_layers(raw, mixer, sizes))


def mllama(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    if (crossed := raw.get("cross_attention_layers")) != []:
        raise ModelError(
            f"config.json: cross_attention_layers must be []: they are not computed, got {shown(crossed)}"
        )
    return plan(raw)


FAMILIES = (
    Family(("LlamaForCausalLM",), plan),
    Family(("MllamaForConditionalGeneration", "MllamaForCausalLM"), mllama, config_keys.WRAPPED),
)
