"""Decoders most of whose layers keep a state."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.decoders import granite
from petiole.gpu_worker.models.checkpoint.gguf.specifics.mixtures import qwen2moe
from petiole.gpu_worker.models.checkpoint.gguf.specifics.shared import (
    FULL,
    LINEAR,
    Config,
    chosen,
    has,
    sigmoid_routing,
)


def _delta_nets(metadata: Metadata, common: Config) -> Config:
    n, heads = common["num_hidden_layers"], metadata.whole("ssm.time_step_rank")
    every, inner = metadata.whole("full_attention_interval", 4), metadata.whole("ssm.inner_size")
    if inner % heads:
        raise metadata.wrong("ssm.inner_size", f"be a multiple of {heads}, the heads of values", inner)
    recurrent = metadata.get("attention.recurrent_layers", [(i + 1) % every != 0 for i in range(n)])
    if not isinstance(recurrent, list) or len(recurrent) < n or not all(type(one) is bool for one in recurrent):
        limit = f"say of each of {n} layers whether it keeps a state"
        raise metadata.wrong("attention.recurrent_layers", limit, shown(recurrent))
    return {
        "layer_types": [LINEAR if keeps else FULL for keeps in recurrent[:n]],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def qwen35(metadata: Metadata, common: Config) -> Config:
    return {**_delta_nets(metadata, common), "linear_value_heads_tiled": True}


def qwen35moe(metadata: Metadata, common: Config) -> Config:
    return {**qwen2moe(metadata, common), **qwen35(metadata, common)}


def qwen3next(metadata: Metadata, common: Config) -> Config:
    return {**qwen2moe(metadata, common), **_delta_nets(metadata, common)}


def lfm2(metadata: Metadata, common: Config) -> Config:
    kv_heads = metadata.of_layers("attention.head_count_kv", common["num_hidden_layers"], 1)
    return {
        "layer_types": [FULL if n else "conv" for n in kv_heads],
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in metadata.header.tensors,
        "norm_eps": common["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def lfm2moe(metadata: Metadata, common: Config) -> Config:
    return {
        **lfm2(metadata, common),
        "num_experts": metadata.whole("expert_count"),
        **sigmoid_routing(metadata),
        "num_dense_layers": metadata.whole("leading_dense_block_count", 2, low=0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.header.tensors),
    }


def _heads_of_scan(metadata: Metadata) -> tuple[int, int]:
    """The heads of Mamba-2, and the width of one."""
    heads, inner = metadata.whole("ssm.time_step_rank"), metadata.whole("ssm.inner_size")
    if inner % heads:
        raise metadata.wrong("ssm.inner_size", f"be a multiple of {heads}, the heads", inner)
    return heads, inner // heads


def granitehybrid(metadata: Metadata, common: Config) -> Config:
    heads, width = _heads_of_scan(metadata)
    if heads * width % common["hidden_size"]:
        limit = f"be a multiple of {common['hidden_size']}, the width of the model"
        raise metadata.wrong("ssm.inner_size", limit, heads * width)
    kinds = [f"blk.{i}.ssm_in.weight" in metadata.header.tensors for i in range(common["num_hidden_layers"])]
    experts = metadata.whole("expert_count", 0, low=0)
    return {
        **granite(metadata, common),
        "layer_types": ["mamba" if scans else "attention" for scans in kinds],
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": metadata.whole(
            "expert_shared_feed_forward_length", common["intermediate_size"]
        ),
        "num_local_experts": experts,
        **(chosen(metadata) if experts else {}),
        "mamba_expand": heads * width // common["hidden_size"],
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_n_groups": metadata.whole("ssm.group_count"),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"),
        "mamba_conv_bias": has(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(metadata, "ssm_in.bias"),
    }


_PARTS = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
"""What a stored layer of Nemotron-H is, by a tensor that it has."""


def nemotron_h(metadata: Metadata, common: Config) -> Config:
    (heads, width), tensors = _heads_of_scan(metadata), metadata.header.tensors
    kinds = [
        next((kind for part, kind in _PARTS.items() if f"blk.{i}.{part}.weight" in tensors), "nothing")
        for i in range(common["num_hidden_layers"])
    ]
    config = {
        "layers_block_type": kinds,
        "layer_norm_epsilon": common["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "ssm_state_size": metadata.whole("ssm.state_size"),
        "n_groups": metadata.whole("ssm.group_count"),
        "conv_kernel": metadata.whole("ssm.conv_kernel"),
        "use_conv_bias": has(metadata, "ssm_conv1d.bias"),
        "use_bias": has(metadata, "ssm_in.bias"),
        "attention_bias": has(metadata, "attn_q.bias"),
        "mlp_bias": has(metadata, "ffn_up.bias"),
    }
    if "mlp" in kinds:
        config["intermediate_size"] = tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"].shape[0]
    if "moe" not in kinds:
        return config
    if metadata.has("moe_latent_size"):
        raise metadata.wrong("moe_latent_size", "be absent", metadata.get("moe_latent_size"))
    groups = metadata.whole("expert_group_count", 1)
    return {
        **config,
        **sigmoid_routing(metadata),
        "n_routed_experts": metadata.whole("expert_count"),
        "n_shared_experts": metadata.whole("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        "n_group": groups,
        "topk_group": metadata.whole("expert_group_used_count", 1 if groups == 1 else None),
    }
