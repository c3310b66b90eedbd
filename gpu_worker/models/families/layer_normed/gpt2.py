"""GPT-2: learned positions, biases everywhere, and weights that are stored as [inputs, outputs]."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import MAX_POSITION, FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    prefixes=("transformer.", ""),
    embedding="wte.weight",
    learned_positions="wpe.weight",
    norm="ln_f",
    layer="h.{}.",
    qkv=("attn.c_attn",),
    out=("attn.c_proj",),
    gate_up=("mlp.c_fc",),
    down=("mlp.c_proj",),
    mixer_norm="ln_1",
    feed_forward_norm="ln_2",
    turned=("c_attn", "c_proj", "c_fc"),
)
OF_GGUF = replace(NAMES, qkv=("attn.qkv",), out=("attn.out",), gate_up=("mlp.up",), down=("mlp.down",), turned=())
"""GGUF files store the weights as [outputs, inputs]."""
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def plan(raw: JsonObject) -> ModelPlan:
    usual = {key: raw[own] for key, own in _KEYS.items() if own in raw}
    raw = {"tie_word_embeddings": True, "max_position_embeddings": 1024, **raw, **usual}
    raw = {**raw, "num_key_value_heads": None}
    if raw.get("add_cross_attention"):
        raise ModelError("config.json: add_cross_attention must be false, got true")
    norm = Norm("layer", eps=config_keys.number(raw, "layer_norm_epsilon", 1e-5), bias=True)
    width = config_keys.head_dim(raw)
    inner = config_keys.whole(raw, "n_inner", 2 * config_keys.MAX_WIDTH) if raw.get("n_inner") else None
    act = config_keys.activation(raw, ("gelu_tanh", "gelu", "silu", "relu"), key="activation_function")
    fed = FeedForward(inner or 4 * config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH), act, False, True)
    scale = width**-0.5 if raw.get("scale_attn_weights", True) else 1.0
    mixer = config_keys.usual_attention(raw, width, rotary=None, scale=scale, qkv_bias=True, out_bias=True)
    layers = config_keys.usual_layers(
        raw,
        mixer,
        (0,) * config_keys.n_layers(raw),
        mixer_norm=norm,
        feed_forward_norm=norm,
        feed_forward=fed,
    )
    if raw.get("scale_attn_by_inverse_layer_idx"):
        layers = tuple(
            replace(layer, mixer=replace(layer.attention, scale=scale / (i + 1))) for i, layer in enumerate(layers)
        )
    positions = config_keys.whole(raw, "max_position_embeddings", MAX_POSITION)
    return config_keys.usual_plan(raw, layers, norm=norm, learned_positions=positions)


FAMILIES = (Family(("GPT2LMHeadModel",), plan, replace(NAMES, instead=(OF_GGUF,))),)
