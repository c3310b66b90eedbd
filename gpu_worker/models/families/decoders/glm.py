"""GLM-4 9B and 32B: neighbours are rotated with each other in half of a head, and queries, keys and values have
biases. Those of April 2025 have norms behind attention and feed-forward, too."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    gate_up=("mlp.gate_up_proj",),
    mixer_out_norm="post_self_attn_layernorm",
    feed_forward_out_norm="post_mlp_layernorm",
)

IN_ONE = replace(NAMES, qkv=("self_attn.qkv_proj",))
"""GGUF files of a ChatGLM."""


def glm(raw: JsonObject) -> ModelPlan:
    raw = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "attention_bias": True, **raw}
    width = config_keys.head_dim(raw)
    rotary = replace(config_keys.rotary(raw, width, partial=True), neighbours=True)
    mixer = config_keys.usual_attention(raw, width, rotary=rotary, qkv_bias=bool(raw["attention_bias"]))
    sizes = (0,) * config_keys.n_layers(raw)
    return config_keys.usual_plan(raw, config_keys.usual_layers(raw, mixer, sizes))


def glm4(raw: JsonObject) -> ModelPlan:
    plan, norm = glm(raw), Norm(eps=config_keys.number(raw, "rms_norm_eps", 1.5625e-07))
    layers = (replace(layer, mixer_out_norm=norm, feed_forward_out_norm=norm) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


FAMILIES = (
    Family(("GlmForCausalLM",), glm, replace(NAMES, instead=(IN_ONE,))),
    Family(("Glm4ForCausalLM",), glm4, NAMES),
)
