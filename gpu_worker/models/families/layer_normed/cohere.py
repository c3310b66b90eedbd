"""Command R: parallel layers behind one norm without a bias, and neighbours that are rotated with each other.
Command R7B has windows, and no rotation in layers without one."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan, Norm


def cohere(raw: JsonObject) -> ModelPlan:
    if raw.get("use_qk_norm"):
        raise ModelError("config.json: use_qk_norm must be false, got true: such norms are not computed")
    return _plan({"rope_theta": 500_000.0, **raw}, (0,) * config_keys.n_layers(raw))


def cohere2(raw: JsonObject) -> ModelPlan:
    every = config_keys.or_default(
        raw, "sliding_window_pattern", config_keys.or_default(raw, "_sliding_window_pattern", 4)
    )
    kinds = [
        config_keys.SLIDING if (i + 1) % every else config_keys.FULL for i in range(config_keys.n_layers(raw))
    ]
    sizes = config_keys.windows(raw, windowed=True, default=config_keys.layer_types(raw, kinds))
    plan = _plan(raw, sizes)
    layers = (
        layer if layer.attention.window else replace(layer, mixer=replace(layer.attention, rotary=None))
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def _plan(raw: JsonObject, sizes: tuple[int, ...]) -> ModelPlan:
    raw = {"tie_word_embeddings": True, "logit_scale": 0.0625, **raw}
    norm = Norm("layer", eps=config_keys.number(raw, "layer_norm_eps", 1e-5))
    width, biases = config_keys.head_dim(raw), bool(raw.get("attention_bias", False))
    mixer = config_keys.usual_attention(
        raw,
        width,
        rotary=replace(config_keys.rotary(raw, width), neighbours=True),
        qkv_bias=biases,
        out_bias=biases,
    )
    layers = config_keys.usual_layers(raw, mixer, sizes, mixer_norm=norm, feed_forward_norm=None, parallel=True)
    return config_keys.usual_plan(
        raw, layers, norm=norm, logits_factor=config_keys.number(raw, "logit_scale", 1.0)
    )


FAMILIES = (Family(("CohereForCausalLM",), cohere), Family(("Cohere2ForCausalLM",), cohere2))
