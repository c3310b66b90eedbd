"""Granite 3: Llama with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.decoders.llama import plan as llama
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import ModelPlan


def plan(raw: JsonObject) -> ModelPlan:
    of_llama = llama(raw)
    scale, residual = (
        config_keys.number(raw, key, 1.0) for key in ("attention_multiplier", "residual_multiplier")
    )
    layers = (
        replace(layer, mixer=replace(layer.attention, scale=scale), residual=residual) for layer in of_llama.layers
    )
    return replace(
        of_llama,
        layers=tuple(layers),
        embedding_factor=config_keys.number(raw, "embedding_multiplier", 1.0),
        logits_factor=1 / config_keys.number(raw, "logits_scaling", 1.0, low=1e-6),
    )


FAMILIES = (Family(("GraniteForCausalLM",), plan),)
