"""OLMo 2 and 3: norms stand only after attention and feed-forward, and over all heads at once. OLMo 3 has local
layers, whose rotation is never scaled. OLMoE, whose feed-forwards are experts."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(mixer_out_norm="post_attention_layernorm", feed_forward_out_norm="post_feedforward_layernorm")


def olmo2(raw: JsonObject) -> ModelPlan:
    return _plan(raw, [config_keys.FULL] * config_keys.n_layers(raw))


def olmo3(raw: JsonObject) -> ModelPlan:
    return _plan(
        raw,
        [config_keys.FULL if (i + 1) % 4 == 0 else config_keys.SLIDING for i in range(config_keys.n_layers(raw))],
    )


def _plan(raw: JsonObject, kinds: list[str]) -> ModelPlan:
    norm, biases = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-5)), bool(raw.get("attention_bias", False))
    width, of_layers = config_keys.head_dim(raw), config_keys.layer_types(raw, kinds)
    mixer = config_keys.usual_attention(
        raw, width, rotary=None, q_norm=norm, k_norm=norm, norm_whole=True, qkv_bias=biases, out_bias=biases
    )
    turns = {kind: config_keys.rotary(raw, width, kind) for kind in dict.fromkeys(of_layers)}
    sizes = config_keys.windows(raw, windowed=True, default=of_layers)
    layers = config_keys.usual_layers(
        raw, mixer, sizes, mixer_norm=None, feed_forward_norm=None, mixer_out_norm=norm, feed_forward_out_norm=norm
    )
    turned = (
        replace(layer, mixer=replace(layer.attention, rotary=turns[kind]))
        for layer, kind in zip(layers, of_layers, strict=True)
    )
    return config_keys.usual_plan(raw, tuple(turned))


def olmoe(raw: JsonObject) -> ModelPlan:
    """Norms as in Llama, but those over all heads."""
    raw = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, **raw}
    if (clip := raw.get("clip_qkv")) is not None:
        raise ModelError(f"config.json: clip_qkv must be null, got {shown(clip)}")
    norm, biases = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-5)), bool(raw.get("attention_bias", False))
    width = config_keys.head_dim(raw)
    mixer = config_keys.usual_attention(
        raw, width, q_norm=norm, k_norm=norm, norm_whole=True, qkv_bias=biases, out_bias=biases
    )
    router = config_keys.router(
        raw, "num_experts", "num_local_experts", normalised=bool(raw.get("norm_topk_prob", False))
    )
    each = FeedForward(config_keys.inner(raw), config_keys.activation(raw, ("silu",)))
    sizes = (0,) * config_keys.n_layers(raw)
    layers = config_keys.usual_layers(raw, mixer, sizes, feed_forward=None, experts=Experts(router, each))
    return config_keys.usual_plan(raw, layers)


FAMILIES = (
    Family(("Olmo2ForCausalLM",), olmo2, NAMES),
    Family(("Olmo3ForCausalLM",), olmo3, NAMES),
    Family(("OlmoeForCausalLM",), olmoe),
)
