"""Mistral 7B and its successors: no biases, every layer with a window if there is one. Mixtral, whose
feed-forwards are experts. Ministral 3, whose queries
grow with their position; and the text part of Mistral Small 3, which may be either."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, Growth, ModelPlan
from petiole.gpu_worker.models.weights.names import Names


def mistral(raw: JsonObject) -> ModelPlan:
    mixer = reading.usual_attention(raw, reading.head_dim(raw))
    return reading.usual_plan(raw, reading.usual_layers(raw, mixer, reading.windows(raw, windowed=True)))


def mixtral(raw: JsonObject) -> ModelPlan:
    of_mistral = mistral({"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **raw})
    router = reading.router({"num_experts_per_tok": 2, **raw}, "num_local_experts", normalised=True)
    layers = (
        replace(layer, feed_forward=None, experts=Experts(router, layer.feed_forward))
        for layer in of_mistral.layers
        if layer.feed_forward is not None
    )
    return replace(of_mistral, layers=tuple(layers))


def ministral3(raw: JsonObject) -> ModelPlan:
    of_mistral = mistral({"sliding_window": None, "rms_norm_eps": 1e-5, **raw})
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    beta = reading.number(rope, "llama_4_scaling_beta", 0.0)
    if not beta:
        return of_mistral
    (rotary,) = of_mistral.rotaries
    growth = Growth(beta, rotary.original_max_position)
    layers = (replace(layer, mixer=replace(layer.attention, query_growth=growth)) for layer in of_mistral.layers)
    return replace(of_mistral, layers=tuple(layers))


def mistral3(outer: JsonObject) -> ModelPlan:
    raw, kind = reading.text_part(outer), (outer.get("text_config") or {}).get("model_type", "mistral")
    if kind not in ("mistral", "ministral3"):
        raise ModelError(f"config.json: text_config.model_type must be mistral or ministral3, got {shown(kind)}")
    return ministral3(raw) if kind == "ministral3" else mistral({"sliding_window": None, **raw})


MIXTRAL = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)

FAMILIES = (
    Family(("MistralForCausalLM",), mistral),
    Family(("MixtralForCausalLM",), mixtral, MIXTRAL),
    Family(("Ministral3ForCausalLM",), ministral3),
    Family(("Mistral3ForConditionalGeneration",), mistral3, reading.WRAPPED),
)
