"""Llama 2 and 3, and models with their configuration. Of Llama 3.2 with images, layers of cross attention are
refused. Seed-OSS and ERNIE 4.5 (dense), which differ in biases and in what turns. SmolVLM2, which sees."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys, towers
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Attention, ModelPlan
from petiole.gpu_worker.models.vision.reading import SMOLVLM, with_eyes
from petiole.gpu_worker.models.weights.names import Names


def plan(raw: JsonObject) -> ModelPlan:
    biases = bool(raw.get("attention_bias", False))
    return _plan(
        raw, config_keys.usual_attention(raw, config_keys.head_dim(raw), qkv_bias=biases, out_bias=biases)
    )


def seed_oss(raw: JsonObject) -> ModelPlan:
    biases = {"qkv_bias": bool(raw.get("attention_bias", True)), "out_bias": bool(raw.get("attention_out_bias"))}
    return _plan(raw, config_keys.usual_attention(raw, config_keys.head_dim(raw), **biases))


def ernie(raw: JsonObject) -> ModelPlan:
    """One key for all biases; neighbours are rotated with each other."""
    width, biases = config_keys.head_dim(raw), bool(raw.get("use_bias", False))
    rotary = replace(config_keys.rotary(raw, width), neighbours=True)
    mixer = config_keys.usual_attention(raw, width, rotary=rotary, qkv_bias=biases, out_bias=biases)
    return _plan({**raw, "mlp_bias": biases}, mixer)


def _plan(raw: JsonObject, mixer: Attention) -> ModelPlan:
    sizes = config_keys.windows(raw, windowed=False)
    return config_keys.usual_plan(raw, config_keys.usual_layers(raw, mixer, sizes))


def mllama(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    if (crossed := raw.get("cross_attention_layers")) != []:
        raise ModelError(
            f"config.json: cross_attention_layers must be []: they are not computed, got {shown(crossed)}"
        )
    return plan(raw)


def smolvlm(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    if (kind := raw.get("model_type", "llama")) != "llama":
        raise ModelError(f"config.json: text_config.model_type must be llama for SmolVLM, got {shown(kind)}")
    return plan(raw)


SMOL = Names(prefixes=("model.text_model.", "text_model."), tower=("model.vision_model.", "vision_model."))

FAMILIES = (
    Family(("LlamaForCausalLM",), plan),
    Family(("SeedOssForCausalLM",), seed_oss),
    Family(("Ernie4_5ForCausalLM",), ernie),
    Family(("MllamaForConditionalGeneration", "MllamaForCausalLM"), mllama, config_keys.WRAPPED),
    Family(("SmolVLMForConditionalGeneration",), smolvlm, SMOL, with_eyes(towers.smolvlm, SMOLVLM), sees=True),
)
