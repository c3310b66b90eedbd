"""Gemma's decoders, and EmbeddingGemma."""

from __future__ import annotations

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.shared import (
    FULL,
    SLIDING,
    Config,
    kinds_of_layers,
    pooling,
)
from petiole.gpu_worker.models.checkpoint.gguf.tensor_mapping import FREQUENCIES

_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""The one of this many layers scales its attention by the width of the model for each head."""
_PER_LAYER = "per_layer_token_embd.weight"
_HUGE = 1e20


def _scalar(common: Config) -> int:
    large = common["num_hidden_layers"] == _LARGE_GEMMAS.get(common["model_type"])
    by_heads: int = common["hidden_size"] // common["num_attention_heads"]
    return by_heads if large else common["head_dim"]


def gemma2(metadata: Metadata, common: Config) -> Config:
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": kinds_of_layers(metadata, common["num_hidden_layers"], 2),
        "query_pre_attn_scalar": _scalar(common),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def gemma3(metadata: Metadata, common: Config) -> Config:
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": kinds_of_layers(metadata, common["num_hidden_layers"], 6),
        "query_pre_attn_scalar": _scalar(common),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0),
    }


def gemma4(metadata: Metadata, common: Config) -> Config:
    """key_length is of layers without a window, whose heads are wide, and of which a part is rotated."""
    n, full = common["num_hidden_layers"], common["head_dim"]
    kinds = kinds_of_layers(metadata, n, 6)
    heads = dict(zip(kinds, metadata.of_layers("attention.head_count_kv", n, 1), strict=True))
    inner, tensors = metadata.of_layers("feed_forward_length", n, 1), metadata.header.tensors
    from_keys = f"blk.{kinds.index(FULL) if FULL in kinds else 0}.attn_v.weight" not in tensors
    config = {
        "head_dim": metadata.whole("attention.key_length_swa", full),
        "global_head_dim": full,
        "num_key_value_heads": heads.get(SLIDING, heads[kinds[-1]]),
        "num_global_key_value_heads": heads.get(FULL),
        "attention_k_eq_v": from_keys,
        "sliding_window": metadata.whole("attention.sliding_window", 512),
        "layer_types": kinds,
        "num_kv_shared_layers": metadata.whole("attention.shared_kv_layers", 0, low=0),
        "use_double_wide_mlp": max(inner) == 2 * min(inner),
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0, low=0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0),
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base", 1e6),
                "partial_rotary_factor": _rotated(metadata, full // 2),
            },
            SLIDING: {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)},
        },
    }
    if _PER_LAYER in tensors:
        config["vocab_size_per_layer_input"] = tensors[_PER_LAYER].shape[0]
    if metadata.get("expert_count"):
        config |= {
            "enable_moe_block": True,
            "num_experts": metadata.whole("expert_count"),
            "top_k_experts": metadata.whole("expert_used_count"),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        }
    return config


def _rotated(metadata: Metadata, n: int) -> float:
    """The share of a head's n pairs that are rotated: the others' frequencies are divided by a huge number."""
    if FREQUENCIES not in metadata.header.tensors:
        return 1.0
    factors = metadata.floats(FREQUENCIES, n)
    rotated = factors.count(1.0)
    if factors != sorted(factors) or not all(factor > _HUGE for factor in factors[rotated:]):
        path, got = metadata.header.path, shown(factors)
        raise ModelError(f"{path}: tensor {FREQUENCIES} must be 1 and then over {_HUGE:.0e}, got {got}")
    return rotated / n


_DENSES = "dense_2", "dense_3"
"""The products behind the pooling. llama.cpp's converter leaves out one whose file it does not find."""


def gemma_embedding(metadata: Metadata, common: Config) -> Config:
    path, tensors = metadata.header.path, metadata.header.tensors
    known = {name: tensors[f"{name}.weight"].shape for name in _DENSES if f"{name}.weight" in tensors}
    if len(known) == 1 or any(len(shape) != 2 for shape in known.values()):
        got = ", ".join(f"{name} {[*shape]}" for name, shape in known.items())
        raise ModelError(f"{path}: {' and '.join(_DENSES)} must both be matrices, or both be absent, got {got}")
    found = [(name, *reversed(shape)) for name, shape in known.items()]
    return {
        **gemma3(metadata, common),
        "use_bidirectional_attention": True,
        "pooling": pooling(metadata),
        "denses": found,
    }
