"""SmolLM3: Llama, with layers that rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    raw = {"tie_word_embeddings": True, "sliding_window": None, **raw}
    biases, n = bool(raw.get("attention_bias", False)), reading.n_layers(raw)
    every = reading.whole(raw, "no_rope_layer_interval", reading.MAX_LAYERS, 4)
    turned = raw.get("no_rope_layers") or [(i + 1) % every for i in range(n)]  # of a layer without rotation: 0
    if len(turned) != n:
        raise ModelError(f"config.json: no_rope_layers must have {n} entries, got {len(turned)}")
    local = [reading.FULL if turns else reading.SLIDING for turns in turned]
    sizes = reading.windows(raw, windowed=bool(raw.get("use_sliding_window", False)), default=local)
    mixer = reading.usual_attention(raw, reading.head_dim(raw), qkv_bias=biases, out_bias=biases)
    layers = (
        layer if turns else replace(layer, mixer=replace(layer.attention, rotary=None))
        for layer, turns in zip(reading.usual_layers(raw, mixer, sizes), turned, strict=True)
    )
    return reading.usual_plan(raw, tuple(layers))


FAMILIES = (Family(("SmolLM3ForCausalLM",), plan),)
