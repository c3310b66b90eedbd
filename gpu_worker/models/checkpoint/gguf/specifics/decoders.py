"""Decoders without experts and states, but Gemma's."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.shared import (
    Config,
    has,
    kinds_of_layers,
    layer_norm,
    plain_rotation,
)


def phi3(metadata: Metadata, common: Config) -> Config:
    window = metadata.whole("attention.sliding_window", 0, low=0)
    return {"sliding_window": window or None, "original_max_position_embeddings": _original(metadata, common)}


def _original(metadata: Metadata, common: Config) -> int:
    return metadata.whole("rope.scaling.original_context_length", common["max_position_embeddings"])


def granite(metadata: Metadata, common: Config) -> Config:
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", common["head_dim"] ** -0.5),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def mistral3(metadata: Metadata, common: Config) -> Config:
    if metadata.has("attention.temperature_scale") and metadata.get("rope.scaling.type") != "yarn":
        raise metadata.wrong("rope.scaling.type", "be yarn beside attention.temperature_scale", "another")
    return {"sliding_window": None, "rope_parameters": plain_rotation(common)}


def seed_oss(metadata: Metadata, common: Config) -> Config:
    return {"attention_out_bias": "blk.0.attn_output.bias" in metadata.header.tensors}


def ernie(metadata: Metadata, common: Config) -> Config:
    return {"use_bias": common["attention_bias"]}


def exaone4(metadata: Metadata, common: Config) -> Config:
    if not metadata.has("attention.sliding_window"):
        return {"sliding_window": None}
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": kinds_of_layers(metadata, common["num_hidden_layers"], 4),
    }


def olmo2(metadata: Metadata, common: Config) -> Config:
    if not metadata.has("attention.sliding_window"):
        return {}
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": kinds_of_layers(metadata, common["num_hidden_layers"], 4),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": common["rope_theta"]}
            for kind in ("sliding_attention", "full_attention")
        },
    }


def starcoder2(metadata: Metadata, common: Config) -> Config:
    window = metadata.whole("attention.sliding_window", 0, low=0)
    return {
        "norm_epsilon": metadata.number("attention.layer_norm_epsilon", 1e-5),
        "sliding_window": window or None,
        "use_bias": common["attention_bias"],
    }


def glm4(metadata: Metadata, common: Config) -> Config:
    if any(
        sections := metadata.get("rope.dimension_sections") or ()
    ):  # the rows of its heads are in another order
        raise metadata.wrong("rope.dimension_sections", "be absent: models that see are not read", shown(sections))
    return {}


def cohere(metadata: Metadata, common: Config) -> Config:
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": metadata.number("logit_scale", 1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.header.tensors,
    }


def cohere2(metadata: Metadata, common: Config) -> Config:
    return {
        **cohere(metadata, common),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": kinds_of_layers(metadata, common["num_hidden_layers"], 4),
    }


def phi2(metadata: Metadata, common: Config) -> Config:
    return {"layer_norm_eps": layer_norm(metadata, 1e-5), "hidden_act": "gelu_new"}


def gpt2(metadata: Metadata, common: Config) -> Config:
    return {
        "n_embd": common["hidden_size"],
        "n_head": common["num_attention_heads"],
        "n_layer": common["num_hidden_layers"],
        "n_positions": common["max_position_embeddings"],
        "n_inner": common["intermediate_size"],
        "layer_norm_epsilon": layer_norm(metadata, 1e-5),
    }


def chatglm(metadata: Metadata, common: Config) -> Config:
    return {"attention_bias": has(metadata, "attn_q.bias") or has(metadata, "attn_qkv.bias")}
