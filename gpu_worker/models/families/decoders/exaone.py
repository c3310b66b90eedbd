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
    kinds = _kinds(raw, n) if windowed and not raw.get("layer_types") else None
    sizes = config_keys.windows(raw, windowed=windowed, default=kinds)
    layers = config_keys.usual_layers(
        raw, mixer, sizes, mixer_norm=None, feed_forward_norm=None, mixer_out_norm=norm, feed_forward_out_norm=norm
    )
    turned = (
        layer if size or not windowed else replace(layer, mixer=replace(layer.attention, rotary=None))
        for layer, size in zip(layers, sizes, strict=True)
    )
    return config_keys.usual_plan(raw, tuple(turned))


def _kinds(raw: JsonObject, n: int) -> list[str]:
    """`sliding_window_pattern`: of so many layers the last one attends to all; or these letters again and again,
    with L for a window, and the last layer attends to all; or null for no windows."""
    pattern = raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern:
        local = [pattern[i % len(pattern)] == "L" and i < n - 1 for i in range(n)]
    elif pattern is None:
        local = [False] * n
    else:
        every = config_keys.whole(raw, "sliding_window_pattern", config_keys.MAX_LAYERS, 4)
        local = [(i + 1) % every != 0 for i in range(n)]
    return [config_keys.SLIDING if one else config_keys.FULL for one in local]


FAMILIES = (Family(("Exaone4ForCausalLM",), plan, NAMES),)
