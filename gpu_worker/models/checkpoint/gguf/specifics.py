"""What config.json has of each architecture beside what all have, from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.tensor_mapping import FREQUENCIES

Config = dict[str, Any]

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""The one of this many layers scales its attention by the width of the model for each head."""
_PER_LAYER = "per_layer_token_embd.weight"
_HUGE = 1e20
_SOFTMAX = 1
_POOLING = {1: "mean", 2: "first", 3: "last"}
_SIGMOID = 2
_GLM_FLASH = ((47, 48), 154_880)
"""The layers, with or without those that predict further tokens, and the vocabulary of GLM-4.7-Flash, whose first
files do not say how experts are scored."""


def _kinds(metadata: Metadata, n: int, every: int) -> list[str]:
    """The kinds of layers. every: of this many layers the last one attends to all, unless the file says
    otherwise."""
    pattern = metadata.get("attention.sliding_window_pattern", every)
    if type(pattern) is int and pattern >= 0:
        return [_SLIDING if pattern and (i + 1) % pattern else _FULL for i in range(n)]
    if not isinstance(pattern, list) or len(pattern) != n:
        limit = f"be a whole number, or say of each of {n} layers whether it has a window"
        raise metadata.wrong("attention.sliding_window_pattern", limit, shown(pattern))
    return [_SLIDING if local else _FULL for local in pattern]


def _scalar(common: Config) -> int:
    large = common["num_hidden_layers"] == _LARGE_GEMMAS.get(common["model_type"])
    by_heads: int = common["hidden_size"] // common["num_attention_heads"]
    return by_heads if large else common["head_dim"]


def _gemma2(metadata: Metadata, common: Config) -> Config:
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": _kinds(metadata, common["num_hidden_layers"], 2),
        "query_pre_attn_scalar": _scalar(common),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, common: Config) -> Config:
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": _kinds(metadata, common["num_hidden_layers"], 6),
        "query_pre_attn_scalar": _scalar(common),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0),
    }


def _gemma4(metadata: Metadata, common: Config) -> Config:
    """key_length is of layers without a window, whose heads are wide, and of which a part is rotated."""
    n, full = common["num_hidden_layers"], common["head_dim"]
    kinds = _kinds(metadata, n, 6)
    heads = dict(zip(kinds, metadata.of_layers("attention.head_count_kv", n, 1), strict=True))
    inner, tensors = metadata.of_layers("feed_forward_length", n, 1), metadata.header.tensors
    from_keys = f"blk.{kinds.index(_FULL) if _FULL in kinds else 0}.attn_v.weight" not in tensors
    config = {
        "head_dim": metadata.whole("attention.key_length_swa", full),
        "global_head_dim": full,
        "num_key_value_heads": heads.get(_SLIDING, heads[kinds[-1]]),
        "num_global_key_value_heads": heads.get(_FULL),
        "attention_k_eq_v": from_keys,
        "sliding_window": metadata.whole("attention.sliding_window", 512),
        "layer_types": kinds,
        "num_kv_shared_layers": metadata.whole("attention.shared_kv_layers", 0, low=0),
        "use_double_wide_mlp": max(inner) == 2 * min(inner),
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0, low=0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0),
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base", 1e6),
                "partial_rotary_factor": _rotated(metadata, full // 2),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)},
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


def _mixtral(metadata: Metadata, common: Config) -> Config:
    if not metadata.get("expert_count"):
        return {}
    return {"num_local_experts": metadata.whole("expert_count"), **_chosen(metadata), "sliding_window": None}


def _chosen(metadata: Metadata) -> Config:
    return {"num_experts_per_tok": metadata.whole("expert_used_count")}


def _scored_by_sigmoid(metadata: Metadata) -> Config:
    if metadata.whole("expert_gating_func", _SIGMOID, low=0) != _SIGMOID:
        raise metadata.wrong("expert_gating_func", f"be {_SIGMOID}, sigmoid", metadata.get("expert_gating_func"))
    return {
        **_chosen(metadata),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _qwen2moe(metadata: Metadata, common: Config) -> Config:
    return {
        "num_experts": metadata.whole("expert_count"),
        **_chosen(metadata),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _qwen3moe(metadata: Metadata, common: Config) -> Config:
    return {
        "num_experts": metadata.whole("expert_count"),
        **_chosen(metadata),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


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
        "layer_types": [_LINEAR if keeps else _FULL for keeps in recurrent[:n]],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _qwen35(metadata: Metadata, common: Config) -> Config:
    return {**_delta_nets(metadata, common), "linear_value_heads_tiled": True}


def _qwen35moe(metadata: Metadata, common: Config) -> Config:
    return {**_qwen2moe(metadata, common), **_qwen35(metadata, common)}


def _qwen3next(metadata: Metadata, common: Config) -> Config:
    return {**_qwen2moe(metadata, common), **_delta_nets(metadata, common)}


def _phi3(metadata: Metadata, common: Config) -> Config:
    window = metadata.whole("attention.sliding_window", 0, low=0)
    return {"sliding_window": window or None, "original_max_position_embeddings": _original(metadata, common)}


def _original(metadata: Metadata, common: Config) -> int:
    return metadata.whole("rope.scaling.original_context_length", common["max_position_embeddings"])


def _granite(metadata: Metadata, common: Config) -> Config:
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", common["head_dim"] ** -0.5),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _mistral3(metadata: Metadata, common: Config) -> Config:
    if metadata.has("attention.temperature_scale") and metadata.get("rope.scaling.type") != "yarn":
        raise metadata.wrong("rope.scaling.type", "be yarn beside attention.temperature_scale", "another")
    return {"sliding_window": None, "rope_parameters": _plain_rotation(common)}


def _plain_rotation(common: Config) -> Config:
    """What a file without `rope.scaling` says. The default of the class is another."""
    return {"rope_type": "default", "rope_theta": common["rope_theta"]}


def _seed_oss(metadata: Metadata, common: Config) -> Config:
    return {"attention_out_bias": "blk.0.attn_output.bias" in metadata.header.tensors}


def _ernie(metadata: Metadata, common: Config) -> Config:
    return {"use_bias": common["attention_bias"]}


def _exaone4(metadata: Metadata, common: Config) -> Config:
    if not metadata.has("attention.sliding_window"):
        return {"sliding_window": None}
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _kinds(metadata, common["num_hidden_layers"], 4),
    }


def _olmo2(metadata: Metadata, common: Config) -> Config:
    if not metadata.has("attention.sliding_window"):
        return {}
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _kinds(metadata, common["num_hidden_layers"], 4),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": common["rope_theta"]}
            for kind in ("sliding_attention", "full_attention")
        },
    }


def _starcoder2(metadata: Metadata, common: Config) -> Config:
    window = metadata.whole("attention.sliding_window", 0, low=0)
    return {
        "norm_epsilon": metadata.number("attention.layer_norm_epsilon", 1e-5),
        "sliding_window": window or None,
        "use_bias": common["attention_bias"],
    }


def _glm4(metadata: Metadata, common: Config) -> Config:
    if any(
        sections := metadata.get("rope.dimension_sections") or ()
    ):  # the rows of its heads are in another order
        raise metadata.wrong("rope.dimension_sections", "be absent: models that see are not read", shown(sections))
    return {}


def _glm4moe(metadata: Metadata, common: Config) -> Config:
    return {
        "n_routed_experts": metadata.whole("expert_count"),
        **_scored_by_sigmoid(metadata),
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
    found = metadata.whole("expert_gating_func", _SIGMOID if flash else _SOFTMAX)
    if found not in (_SOFTMAX, _SIGMOID):
        limit = f"be {_SOFTMAX}, softmax, or {_SIGMOID}, sigmoid"
        raise metadata.wrong("expert_gating_func", limit, found)
    return found == _SIGMOID


def _deepseek2(metadata: Metadata, common: Config) -> Config:
    """Newer files give the sizes of heads before they are brought into the space of latents under names of their
    own."""
    turning, sigmoid = metadata.whole("rope.dimension_count"), scored_by_sigmoid(metadata)
    width = metadata.whole("attention.key_length_mla", common["head_dim"], low=turning)
    groups = metadata.whole("expert_group_count", 1)
    routing = {
        "scoring_func": "sigmoid",
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "topk_method": "noaux_tc",
    }
    if not sigmoid:
        routing = {
            "scoring_func": "softmax",
            "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
            "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        }
    rank, value = (
        metadata.whole("attention.q_lora_rank", 0, low=0),
        metadata.whole("attention.value_length", width),
    )
    return routing | {
        **_chosen(metadata),
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


def _gpt_oss(metadata: Metadata, common: Config) -> Config:
    n = common["num_hidden_layers"]
    return {
        "num_local_experts": metadata.whole("expert_count"),
        **_chosen(metadata),
        "intermediate_size": metadata.whole("expert_feed_forward_length", common["intermediate_size"]),
        "sliding_window": metadata.whole("attention.sliding_window", 128),
        "layer_types": _kinds(metadata, n, 2),
        "rope_parameters": _plain_rotation(common),
    }


def _lfm2(metadata: Metadata, common: Config) -> Config:
    kv_heads = metadata.of_layers("attention.head_count_kv", common["num_hidden_layers"], 1)
    return {
        "layer_types": [_FULL if n else "conv" for n in kv_heads],
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in metadata.header.tensors,
        "norm_eps": common["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(metadata: Metadata, common: Config) -> Config:
    return {
        **_lfm2(metadata, common),
        "num_experts": metadata.whole("expert_count"),
        **_scored_by_sigmoid(metadata),
        "num_dense_layers": metadata.whole("leading_dense_block_count", 2, low=0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.header.tensors),
    }


def _olmoe(metadata: Metadata, common: Config) -> Config:
    return {"num_experts": metadata.whole("expert_count"), **_chosen(metadata), "norm_topk_prob": False}


def _cohere(metadata: Metadata, common: Config) -> Config:
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": metadata.number("logit_scale", 1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.header.tensors,
    }


def _cohere2(metadata: Metadata, common: Config) -> Config:
    return {
        **_cohere(metadata, common),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": _kinds(metadata, common["num_hidden_layers"], 4),
    }


def _has(metadata: Metadata, part: str) -> bool:
    """Whether some layer has this tensor."""
    return any(name.endswith(f".{part}") for name in metadata.header.tensors)


def _layer_norm(metadata: Metadata, default: float) -> float:
    return metadata.number("attention.layer_norm_epsilon", default)


def _phi2(metadata: Metadata, common: Config) -> Config:
    return {"layer_norm_eps": _layer_norm(metadata, 1e-5), "hidden_act": "gelu_new"}


def _gpt2(metadata: Metadata, common: Config) -> Config:
    return {
        "n_embd": common["hidden_size"],
        "n_head": common["num_attention_heads"],
        "n_layer": common["num_hidden_layers"],
        "n_positions": common["max_position_embeddings"],
        "n_inner": common["intermediate_size"],
        "layer_norm_epsilon": _layer_norm(metadata, 1e-5),
    }


def _chatglm(metadata: Metadata, common: Config) -> Config:
    return {"attention_bias": _has(metadata, "attn_q.bias") or _has(metadata, "attn_qkv.bias")}


def _heads_of_scan(metadata: Metadata) -> tuple[int, int]:
    """The heads of Mamba-2, and the width of one."""
    heads, inner = metadata.whole("ssm.time_step_rank"), metadata.whole("ssm.inner_size")
    if inner % heads:
        raise metadata.wrong("ssm.inner_size", f"be a multiple of {heads}, the heads", inner)
    return heads, inner // heads


def _granitehybrid(metadata: Metadata, common: Config) -> Config:
    heads, width = _heads_of_scan(metadata)
    if heads * width % common["hidden_size"]:
        limit = f"be a multiple of {common['hidden_size']}, the width of the model"
        raise metadata.wrong("ssm.inner_size", limit, heads * width)
    kinds = [f"blk.{i}.ssm_in.weight" in metadata.header.tensors for i in range(common["num_hidden_layers"])]
    experts = metadata.whole("expert_count", 0, low=0)
    return {
        **_granite(metadata, common),
        "layer_types": ["mamba" if scans else "attention" for scans in kinds],
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": metadata.whole(
            "expert_shared_feed_forward_length", common["intermediate_size"]
        ),
        "num_local_experts": experts,
        **(_chosen(metadata) if experts else {}),
        "mamba_expand": heads * width // common["hidden_size"],
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_n_groups": metadata.whole("ssm.group_count"),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"),
        "mamba_conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(metadata, "ssm_in.bias"),
    }


_PARTS = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
"""What a stored layer of Nemotron-H is, by a tensor that it has."""


def _nemotron_h(metadata: Metadata, common: Config) -> Config:
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
        "use_conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "use_bias": _has(metadata, "ssm_in.bias"),
        "attention_bias": _has(metadata, "attn_q.bias"),
        "mlp_bias": _has(metadata, "ffn_up.bias"),
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
        **_scored_by_sigmoid(metadata),
        "n_routed_experts": metadata.whole("expert_count"),
        "n_shared_experts": metadata.whole("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        "n_group": groups,
        "topk_group": metadata.whole("expert_group_used_count", 1 if groups == 1 else None),
    }


def _pooling(metadata: Metadata) -> str:
    kind = metadata.whole("pooling_type", 1)
    if kind not in _POOLING:
        raise metadata.wrong("pooling_type", f"be one of {sorted(_POOLING)}", kind)
    return _POOLING[kind]


def _both_turns(metadata: Metadata, common: Config, local: float) -> Config:
    """The rotations of layers without a window and with one. local: the default of the second."""
    thetas = {_FULL: common["rope_theta"], _SLIDING: metadata.number("rope.freq_base_swa", local)}
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}


def _gemma_embedding(metadata: Metadata, common: Config) -> Config:
    found = [
        (name, *reversed(metadata.header.tensors[f"{name}.weight"].shape))
        for name in ("dense_2", "dense_3")
        if f"{name}.weight" in metadata.header.tensors
    ]
    return {
        **_gemma3(metadata, common),
        "use_bidirectional_attention": True,
        "pooling": _pooling(metadata),
        "denses": found,
    }


def _modern_bert(metadata: Metadata, common: Config) -> Config:
    return {
        "norm_eps": _layer_norm(metadata, 1e-5),
        "local_attention": metadata.whole("attention.sliding_window", 128),
        "global_attn_every_n_layers": metadata.whole("attention.sliding_window_pattern", 3),
        "rope_parameters": _both_turns(metadata, common, common["rope_theta"]),
        "hidden_activation": metadata.get("hidden_act", metadata.get("hidden_activation", "gelu")),
        "attention_bias": _has(metadata, "attn_qkv.bias"),
        "pooling": _pooling(metadata),
    }


def _bert(metadata: Metadata, common: Config) -> Config:
    if metadata.get("attention.causal"):
        raise metadata.wrong("attention.causal", "be false", True)
    types = metadata.header.tensors.get("token_types.weight")
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": 1 if types is None else types.shape[0],
        "pooling": _pooling(metadata),
    }


SPECIFICS: Mapping[str, Callable[[Metadata, Config], Config]] = {
    "llama": _mixtral,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen3vlmoe": _qwen3moe,
    "qwen3next": _qwen3next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma-embedding": _gemma_embedding,
    "phi2": _phi2,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "mistral3": _mistral3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "granite": _granite,
    "granitehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
    "chatglm": _chatglm,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "olmoe": _olmoe,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "bert": _bert,
    "modern-bert": _modern_bert,
    "nomic-bert": _bert,
}
"""By `general.architecture`."""
BY_LAYER = frozenset({"gemma4"})
"""Architectures whose layers differ in heads, feed-forwards and rotation."""
PARTLY_TURNED = frozenset(
    {"phi2", "phi3", "deepseek2", "chatglm", "glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe"}
)
"""Architectures that rotate a part of each head."""
NOT_TURNED = frozenset({"nemotron_h", "nemotron_h_moe"})
"""Architectures that rotate no head, whatever their files say of that."""
OF_LATENTS = frozenset({"deepseek2"})
"""Architectures whose attention reads latents."""
