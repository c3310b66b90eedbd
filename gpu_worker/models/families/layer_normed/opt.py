"""OPT: learned positions from row 2 on, and feed-forwards of relu."""

from __future__ import annotations

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import MAX_POSITION, FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    prefixes=("model.decoder.", "decoder.", ""),
    norm="final_layer_norm",
    out=("self_attn.out_proj",),
    gate_up=("fc1",),
    down=("fc2",),
    mixer_norm="self_attn_layer_norm",
    feed_forward_norm="final_layer_norm",
)
_FIRST = 2


def plan(raw: JsonObject) -> ModelPlan:
    raw = {"tie_word_embeddings": True, **raw, "num_key_value_heads": None}
    hidden = config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH)
    only = {"do_layer_norm_before": True, "word_embed_proj_dim": hidden, "layer_norm_elementwise_affine": True}
    for key, value in only.items():
        if (given := raw.get(key)) not in (None, value):
            raise ModelError(f"config.json: {key} must be {value} for OPT, got {shown(given)}")
    norm, biases = Norm("layer", eps=1e-5, bias=True), bool(raw.get("enable_bias", True))
    inner = config_keys.whole(raw, "ffn_dim", 2 * config_keys.MAX_WIDTH)
    act = config_keys.activation(raw, ("relu", "gelu", "gelu_tanh", "silu"), key="activation_function")
    mixer = config_keys.usual_attention(
        raw, config_keys.head_dim(raw), rotary=None, qkv_bias=biases, out_bias=biases
    )
    layers = config_keys.usual_layers(
        raw,
        mixer,
        (0,) * config_keys.n_layers(raw),
        mixer_norm=norm,
        feed_forward_norm=norm,
        feed_forward=FeedForward(inner, act, gated=False, bias=biases),
    )
    positions = config_keys.whole(raw, "max_position_embeddings", MAX_POSITION, 2048)
    return config_keys.usual_plan(
        raw,
        layers,
        norm=None if raw.get("_remove_final_layer_norm") else norm,
        max_position=positions,
        learned_positions=positions + _FIRST,
        first_position=_FIRST,
    )


FAMILIES = (Family(("OPTForCausalLM",), plan, NAMES),)
