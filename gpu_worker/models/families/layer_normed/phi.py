"""Phi-1, 1.5 and 2: parallel layers behind one norm, biases everywhere, a rotated part of each head."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(norm="final_layernorm", out=("self_attn.dense",), gate_up=("mlp.fc1",), down=("mlp.fc2",))
IN_ONE = replace(NAMES, qkv=("self_attn.qkv_proj",))
"""Queries, keys and values of old GGUF files."""


def plan(raw: JsonObject) -> ModelPlan:
    if raw.get("qk_layernorm"):
        raise ModelError("config.json: qk_layernorm must be false, got true: such norms are not computed")
    raw = {"partial_rotary_factor": 0.5, **raw}
    norm = Norm("layer", eps=config_keys.number(raw, "layer_norm_eps", 1e-5), bias=True)
    width, rotary = config_keys.head_dim(raw), config_keys.rotary(raw, config_keys.head_dim(raw), partial=True)
    mixer = config_keys.usual_attention(raw, width, rotary=rotary, qkv_bias=True, out_bias=True)
    fed = FeedForward(
        config_keys.inner(raw), config_keys.activation(raw, ("gelu_tanh", "gelu", "relu")), gated=False, bias=True
    )
    layers = config_keys.usual_layers(
        raw,
        mixer,
        (0,) * config_keys.n_layers(raw),
        mixer_norm=norm,
        feed_forward_norm=None,
        feed_forward=fed,
        parallel=True,
    )
    return config_keys.usual_plan(raw, layers, norm=norm, head_bias=True)


FAMILIES = (Family(("PhiForCausalLM",), plan, replace(NAMES, instead=(IN_ONE,))),)
