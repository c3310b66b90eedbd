"""SmolLM3: Llama, with layers that rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    biases, n = bool(raw.get("attention_bias", False)), config_keys.n_layers(raw)
    every = config_keys.whole(raw, "no_rope_layer_interval", config_keys.MAX_LAYERS, 4)
    turned = raw.get("no_rope_layers") or [(i + 1) % every for i in range(n)]  # of a layer without rotation: 0
    if not isinstance(turned, list) or len(turned) != n:
        raise ModelError(f"config.json: no_rope_layers must be a list of {n} entries, got {shown(turned)}")
    local = [config_keys.FULL if turns else config_keys.SLIDING for turns in turned]
    sizes = config_keys.windows(raw, windowed=bool(raw.get("use_sliding_window", False)), default=local)
    mixer = config_keys.usual_attention(raw, config_keys.head_dim(raw), qkv_bias=biases, out_bias=biases)
    layers = (
        layer if turns else replace(layer, mixer=replace(layer.attention, rotary=None))
        for layer, turns in zip(config_keys.usual_layers(raw, mixer, sizes), turned, strict=True)
    )
    return config_keys.usual_plan(raw, tuple(layers))


FAMILIES = (Family(("SmolLM3ForCausalLM",), plan),)
