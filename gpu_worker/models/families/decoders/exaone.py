"""EXAONE 4: norms stand only after attention and feed-forward, and over queries and keys of each head. Where some
layers have a window, the others rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.decoders.olmo import NAMES
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan, Norm


def plan(raw: JsonObject) -> ModelPlan:
    norm, n = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-5)), config_keys.n_layers(raw)
    windowed = raw.get("sliding_window", 4096) is not None
    mixer = config_keys.usual_attention(raw, config_keys.head_dim(raw), q_norm=norm, k_norm=norm)
    sizes = config_keys.windows(raw, windowed=windowed, default=_kinds(raw, n) if windowed else None)
    layers = config_keys.usual_layers(
        raw, mixer, sizes, mixer_norm=None, feed_forward_norm=None, mixer_out_norm=norm, feed_forward_out_norm=norm
    )
    turned = (
        layer if size or not windowed else replace(layer, mixer=replace(layer.attention, rotary=None))
        for layer, size in zip(layers, sizes, strict=True)
    )
    return config_keys.usual_plan(raw, tuple(turned))


def _kinds(raw: JsonObject, n: int) -> list[str]:
    """Of this many layers the last one attends to all."""
    every = config_keys.whole(raw, "sliding_window_pattern", config_keys.MAX_LAYERS, 4)
    return [config_keys.SLIDING if (i + 1) % every else config_keys.FULL for i in range(n)]


FAMILIES = (Family(("Exaone4ForCausalLM",), plan, NAMES),)
