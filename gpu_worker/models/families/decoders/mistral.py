"""Mistral 7B and its successors: no biases, every layer with a window if there is one. Mixtral, whose
feed-forwards are experts. Ministral 3, whose queries grow with their position. Mistral Small 3.1, which sees, and
whose text part may be either."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys, towers
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, Growth, ModelPlan
from petiole.gpu_worker.models.vision.reading import PIXTRAL, with_eyes
from petiole.gpu_worker.models.weights.names import Names


def mistral(raw: JsonObject) -> ModelPlan:
    mixer = config_keys.usual_attention(raw, config_keys.head_dim(raw))
    return config_keys.usual_plan(
        raw, config_keys.usual_layers(raw, mixer, config_keys.windows(raw, windowed=True))
    )


def mixtral(raw: JsonObject) -> ModelPlan:
    of_mistral = mistral(raw)
    router = config_keys.router(raw, "num_local_experts", normalised=True)
    layers = (
        replace(layer, feed_forward=None, experts=Experts(router, layer.feed_forward))
        for layer in of_mistral.layers
        if layer.feed_forward is not None
    )
    return replace(of_mistral, layers=tuple(layers))


def ministral3(raw: JsonObject) -> ModelPlan:
    of_mistral = mistral(raw)
    beta = config_keys.number(raw["rope_parameters"], "llama_4_scaling_beta", 0.0)
    if not beta:
        return of_mistral
    (rotary,) = of_mistral.rotaries
    growth = Growth(beta, rotary.original_max_position)
    layers = (replace(layer, mixer=replace(layer.attention, query_growth=growth)) for layer in of_mistral.layers)
    return replace(of_mistral, layers=tuple(layers))


def mistral3(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    return ministral3(raw) if raw.get("model_type") == "ministral3" else mistral(raw)


MIXTRAL = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)

SEEING = replace(config_keys.WRAPPED, tower=("model.vision_tower.", "vision_tower."))
"""With the names of its tower."""

FAMILIES = (
    Family(("MistralForCausalLM",), mistral),
    Family(("MixtralForCausalLM",), mixtral, MIXTRAL),
    Family(("Ministral3ForCausalLM",), ministral3),
    Family(("Mistral3ForConditionalGeneration",), mistral3, SEEING, with_eyes(towers.pixtral, PIXTRAL), sees=True),
)
