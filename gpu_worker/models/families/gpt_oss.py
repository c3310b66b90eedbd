"""gpt-oss: experts whose gates are clamped, sinks of attention, every second layer with a window. Its experts are
stored in one tensor a product, plain or as MXFP4."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, FeedForward, ModelPlan
from petiole.gpu_worker.models.weights.names import Fused, Names

NAMES = Names(router="mlp.router", fused=Fused(input_major=True, interleaved=True))

END_TOKENS = (200_002, 200_012)
"""`<|return|>` and `<|call|>`, if the model's files name none. `<|end|>` ends a message, and more may follow."""


def plan(raw: JsonObject) -> ModelPlan:
    raw = {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, **raw}
    biases = bool(raw.get("attention_bias", True))
    width = reading.head_dim(raw, default=64)
    mixer = reading.usual_attention(raw, width, qkv_bias=biases, out_bias=biases, sinks=True)
    every = [reading.FULL if (i + 1) % 2 == 0 else reading.SLIDING for i in range(reading.n_layers(raw))]
    sizes = reading.windows(raw, windowed=True, default=every)
    each = FeedForward(
        reading.whole(raw, "intermediate_size", 2 * reading.MAX_WIDTH),
        reading.activation(raw, ("silu",)),
        bias=True,
        clamp=reading.number(raw, "swiglu_limit", 7.0, low=1e-6),
        slope=reading.number(raw, "swiglu_alpha", 1.702, low=1e-6),
        up_offset=1.0,
    )
    chosen = "num_experts_per_tok" if "num_experts_per_tok" in raw else "experts_per_token"
    router = reading.router(
        {chosen: 4, **raw}, "num_local_experts", "num_experts", chosen=chosen, score="chosen", bias=True
    )
    layers = reading.usual_layers(raw, mixer, sizes, feed_forward=None, experts=Experts(router, each))
    return replace(reading.usual_plan(raw, layers), eos_token_ids=END_TOKENS)


FAMILIES = (Family(("GptOssForCausalLM",), plan, NAMES),)
