"""Encoders of texts, but EmbeddingGemma."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.shared import (
    FULL,
    SLIDING,
    Config,
    has,
    layer_norm,
    plain_rotation,
    pooling,
)


def modern_bert(metadata: Metadata, common: Config) -> Config:
    theta = common["rope_theta"]
    thetas = {FULL: theta, SLIDING: metadata.number("rope.freq_base_swa", theta)}
    return {
        "norm_eps": layer_norm(metadata, 1e-5),
        "local_attention": metadata.whole("attention.sliding_window", 128),
        "global_attn_every_n_layers": metadata.whole("attention.sliding_window_pattern", 3),
        "rope_parameters": {kind: plain_rotation({"rope_theta": one}) for kind, one in thetas.items()},
        "hidden_activation": metadata.get("hidden_act", metadata.get("hidden_activation", "gelu")),
        "attention_bias": has(metadata, "attn_qkv.bias"),
        "pooling": pooling(metadata),
    }


def bert(metadata: Metadata, common: Config) -> Config:
    if metadata.flag("attention.causal", False):
        raise metadata.wrong("attention.causal", "be false", True)
    types = metadata.header.tensors.get("token_types.weight")
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": 1 if types is None else types.shape[0],
        "pooling": pooling(metadata),
    }
