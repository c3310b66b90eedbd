"""StarCoder2: layer norms, biases everywhere, and a feed-forward without a gate."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(gate_up=("mlp.c_fc",), down=("mlp.c_proj",))


def plan(raw: JsonObject) -> ModelPlan:
    raw = {"tie_word_embeddings": True, "sliding_window": None, **raw}
    norm = Norm("layer", eps=reading.number(raw, "norm_epsilon", 1e-5), bias=True)
    biases = bool(raw.get("use_bias", True))
    mixer = reading.usual_attention(raw, reading.head_dim(raw), qkv_bias=biases, out_bias=biases)
    fed = FeedForward(
        reading.inner(raw), reading.activation(raw, ("gelu_tanh", "gelu", "silu")), gated=False, bias=biases
    )
    layers = reading.usual_layers(
        raw,
        mixer,
        reading.windows(raw, windowed=True),
        mixer_norm=norm,
        feed_forward_norm=norm,
        feed_forward=fed,
    )
    return reading.usual_plan(raw, layers, norm=norm)


FAMILIES = (Family(("Starcoder2ForCausalLM",), plan, NAMES),)
