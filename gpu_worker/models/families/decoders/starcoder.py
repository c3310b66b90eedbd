"""StarCoder2: layer norms, biases everywhere, and a feed-forward without a gate."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(gate_up=("mlp.c_fc",), down=("mlp.c_proj",))


def plan(raw: JsonObject) -> ModelPlan:
    norm = Norm("layer", eps=config_keys.number(raw, "norm_epsilon", 1e-5), bias=True)
    biases = bool(raw.get("use_bias", True))
    mixer = config_keys.usual_attention(raw, config_keys.head_dim(raw), qkv_bias=biases, out_bias=biases)
    fed = FeedForward(
        config_keys.inner(raw),
        config_keys.activation(raw, ("gelu_tanh", "gelu", "silu")),
        gated=False,
        bias=biases,
    )
    layers = config_keys.usual_layers(
        raw,
        mixer,
        config_keys.windows(raw, windowed=True),
        mixer_norm=norm,
        feed_forward_norm=norm,
        feed_forward=fed,
    )
    return config_keys.usual_plan(raw, layers, norm=norm)


FAMILIES = (Family(("Starcoder2ForCausalLM",), plan, NAMES),)
