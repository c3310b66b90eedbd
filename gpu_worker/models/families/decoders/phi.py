"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's layers, stored with queries, keys and values as one, and gate and up as
one. Phi-4 -mini rotates a part of a head."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def plan(raw: JsonObject) -> ModelPlan:
    width = config_keys.head_dim(raw)
    mixer = config_keys.usual_attention(raw, width, rotary=config_keys.rotary(raw, width, partial=True))
    sizes = config_keys.windows(raw, windowed=True)
    return config_keys.usual_plan(raw, config_keys.usual_layers(raw, mixer, sizes))


FAMILIES = (Family(("Phi3ForCausalLM",), plan, NAMES),)
