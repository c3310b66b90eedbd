"""Decoders with experts."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.shared import (
    SIGMOID,
    Config,
    chosen,
    kinds_of_layers,
    plain_rotation,
    sigmoid_routing,
)

_SOFTMAX = 1
_GLM_FLASH = ((47, 48), 154_880)
"""The layers, with or without those that predict further tokens, and the vocabulary of GLM-4.7-Flash, whose first
files do not say how experts are scored."""


def mixtral(metadata: Metadata, common: Config) -> Config:
    if not metadata.get("expert_count"):
        return {}
    return {"num_local_experts": metadata.whole("expert_count"), **chosen(metadata), "sliding_window": None}


def qwen2moe(metadata: Metadata, common: Config) -> Config:
    return {
        "num_experts": metadata.whole("expert_count"),
        **chosen(metadata),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def qwen3moe(metadata: Metadata, common: Config) -> Config:
    return {
        "num_experts": metadata.whole("expert_count"),
        **chosen(metadata),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def glm4moe(metadata: Metadata, common: Config) -> Config:
    return {
        "n_routed_experts": metadata.whole("expert_count"),
        **sigmoid_routing(metadata),
        "n_shared_experts": metadata.whole("expert_shared_count", 1),
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 1, low=0),
        "n_group": metadata.whole("expert_group_count", 1),
        "topk_group": metadata.whole("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.header.tensors,
    }


def scored_by_sigmoid(metadata: Metadata) -> bool:
    """Whether a `deepseek2` is a DeepSeek-V3 or GLM-4.7-Flash."""
    layers, vocab = _GLM_FLASH
    embedding = metadata.header.tensors.get("token_embd.weight")
    flash = embedding is not None and embedding.shape[0] == vocab and metadata.whole("block_count") in layers
    found = metadata.whole("expert_gating_func", SIGMOID if flash else _SOFTMAX)
    if found not in (_SOFTMAX, SIGMOID):
        limit = f"be {_SOFTMAX}, softmax, or {SIGMOID}, sigmoid"
        raise metadata.wrong("expert_gating_func", limit, found)
    return found == SIGMOID


def deepseek2(metadata: Metadata, common: Config) -> Config:
    """Newer files give the sizes of heads before they are brought into the space of latents under names of their
    own."""
    turning, sigmoid = metadata.whole("rope.dimension_count"), scored_by_sigmoid(metadata)
    width = metadata.whole("attention.key_length_mla", common["head_dim"], low=turning)
    groups = metadata.whole("expert_group_count", 1)
    routing = {
        "scoring_func": "sigmoid",
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "topk_method": "noaux_tc",
    }
    if not sigmoid:
        routing = {
            "scoring_func": "softmax",
            "norm_topk_prob": metadata.flag("expert_weights_norm", False),
            "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        }
    rank, value = (
        metadata.whole("attention.q_lora_rank", 0, low=0),
        metadata.whole("attention.value_length", width),
    )
    return routing | {
        **chosen(metadata),
        "q_lora_rank": rank or None,
        "kv_lora_rank": metadata.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": width - turning,
        "v_head_dim": metadata.whole("attention.value_length_mla", value),
        "partial_rotary_factor": 1.0,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in metadata.header.tensors,
        "n_routed_experts": metadata.whole("expert_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "n_shared_experts": metadata.whole("expert_shared_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 1, low=0),
        "n_group": groups,
        "topk_group": metadata.whole("expert_group_used_count", 1),
    }


def gpt_oss(metadata: Metadata, common: Config) -> Config:
    n = common["num_hidden_layers"]
    return {
        "num_local_experts": metadata.whole("expert_count"),
        **chosen(metadata),
        "intermediate_size": metadata.whole("expert_feed_forward_length", common["intermediate_size"]),
        "sliding_window": metadata.whole("attention.sliding_window", 128),
        "layer_types": kinds_of_layers(metadata, n, 2),
        "rope_parameters": plain_rotation(common),
    }


def olmoe(metadata: Metadata, common: Config) -> Config:
    return {"num_experts": metadata.whole("expert_count"), **chosen(metadata), "norm_topk_prob": False}
