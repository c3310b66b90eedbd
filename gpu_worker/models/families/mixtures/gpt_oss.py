"""gpt-oss: experts whose gates are clamped, sinks of attention, every second layer with a window. Its experts are
stored in one tensor a product, plain or as MXFP4."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, FeedForward, ModelPlan
from petiole.gpu_worker.models.weights.names import Fused, Names

NAMES = Names(router="mlp.router", fused=Fused(input_major=True, interleaved=True))

END_TOKENS = (200_002, 200_012)
"""`<|return|>` and `<|call|>`, if the model's files name none. `<|end|>` ends a message, and more may follow."""


def plan(raw: JsonObject) -> ModelPlan:
    biases = bool(raw.get("attention_bias", True))
    width = config_keys.head_dim(raw)
    mixer = config_keys.usual_attention(raw, width, qkv_bias=biases, out_bias=biases, sinks=True)
    every = [
        config_keys.FULL if (i + 1) % 2 == 0 else config_keys.SLIDING for i in range(config_keys.n_layers(raw))
    ]
    sizes = config_keys.windows(raw, windowed=True, default=every)
    each = FeedForward(
        config_keys.whole(raw, "intermediate_size", 2 * config_keys.MAX_WIDTH),
        config_keys.activation(raw, ("silu",)),
        bias=True,
        clamp=config_keys.number(raw, "swiglu_limit", 7.0, low=1e-6),
        slope=config_keys.number(raw, "swiglu_alpha", 1.702, low=1e-6),
        up_offset=1.0,
    )
    router = config_keys.router(raw, "num_local_experts", score="chosen", bias=True)
    layers = config_keys.usual_layers(raw, mixer, sizes, feed_forward=None, experts=Experts(router, each))
    return replace(config_keys.usual_plan(raw, layers), eos_token_ids=END_TOKENS)


FAMILIES = (Family(("GptOssForCausalLM",), plan, NAMES),)
