"""Every family that can be served, as small random models of transformers."""

from __future__ import annotations

import copy
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

_LOCAL, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": [_LOCAL, _LOCAL, _FULL] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 5.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
_QWEN3_MOE = {"head_dim": 32, "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN2_MOE = {
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MINISTRAL3 = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
_OLMO3 = {_LOCAL: {"rope_type": "default", "rope_theta": 10_000.0}, _FULL: YARN}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "seed-oss-biases": ("SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32}),
    "ernie4.5-biases": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "exaone4": ("Exaone4", {"sliding_window": 7, "layer_types": [_LOCAL, _LOCAL, _FULL]}),
    "exaone4-pattern": (
        "Exaone4",
        {"sliding_window": 7, "sliding_window_pattern": "LLG", "layer_types": [_LOCAL, _LOCAL, _FULL]},
    ),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": [_FULL] * 3}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 7, "layer_types": [_LOCAL, _FULL, _LOCAL], "query_pre_attn_scalar": 20},
    ),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4-values-from-keys": (
        "Gemma4",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-per-layer": (
        "Gemma4",
        _GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
    ),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "phi4-mini": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 7, "layer_types": [_LOCAL, _FULL, _LOCAL], "rope_parameters": _OLMO3}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": _MINISTRAL3}),
    "qwen3-moe": ("Qwen3Moe", _QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-raw": ("Qwen3Moe", _QWEN3_MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": YARN | {"truncate": False, "original_max_position_embeddings": 16},
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma4-experts": (
        "Gemma4",
        _GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
    ),
}
_GRANITE4 = {
    "num_local_experts": 0,
    "layer_types": [_FULL] * 3,
    "shared_intermediate_size": 80,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
}
_SCAN = "linear_attention"
_MAMBA2 = {
    "layer_types": [_SCAN, _FULL, _SCAN],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
}
FAMILIES |= {
    "gemma1": ("Gemma", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24, "pad_token_id": 0}),
    "granite4": (
        "GraniteMoeHybrid",
        _GRANITE4 | {"shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "granite4-moe": ("GraniteMoeHybrid", _GRANITE4 | {"num_local_experts": 7}),
    "gpt2": ("GPT2", {"n_inner": 96, "activation_function": "gelu_new", "n_positions": 256}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 0}),
    "phi2": ("Phi", {"hidden_act": "gelu_new", "num_key_value_heads": 4}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "pad_token_id": 0}),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 7, "layer_types": [_LOCAL, _FULL, _LOCAL], "logit_scale": 0.5, "pad_token_id": 0},
    ),
    "qwen2-moe": ("Qwen2Moe", _QWEN2_MOE | {"mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "gemma4-unified": (
        "Gemma4Unified",
        {key: value for key, value in _GEMMA4.items() if "per_layer_input" not in key},
    ),
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}
WITH_LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", LATENT | {"q_lora_rank": None, "rope_parameters": _MSCALE}),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 40,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": _MSCALE,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT | {"q_lora_rank": 40, "rope_interleave": False, "n_shared_experts": 1},
    ),
}
"""Families whose attention reads latents."""

_NEMOTRON_H = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "time_step_min": 1e-30,  # transformers bounds the steps of prompts alone
}
_LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": [_SCAN, _FULL, _SCAN, _FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MIXED = {
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
WITH_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", _LINEAR),
    "qwen3.5-moe": ("Qwen3_5Moe", _LINEAR | _MIXED),
    "qwen3-next": ("Qwen3Next", _LINEAR | _MIXED | {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "granite4-h": ("GraniteMoeHybrid", _GRANITE4 | _MAMBA2 | {"mamba_proj_bias": True, "mamba_n_groups": 2}),
    "granite4-h-moe": ("GraniteMoeHybrid", _GRANITE4 | _MAMBA2 | {"num_local_experts": 7}),
    "nemotron-h": ("NemotronH", _NEMOTRON_H | {"layers_block_type": [_SCAN, "mlp", _SCAN, _FULL, "mlp", _SCAN]}),
    "nemotron-h-moe": (
        "NemotronH",
        _NEMOTRON_H
        | {
            "layers_block_type": [_SCAN, "moe", _FULL, "moe", _SCAN, "mlp"],
            "use_bias": True,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
    ),
}
"""Families some of whose layers keep a state."""
NOT_ON_CUDA = {"granite4-h", "granite4-h-moe", "nemotron-h", "nemotron-h-moe"}
"""Families with a state that only the CPU computes."""

EVERY_FAMILY = FAMILIES | WITH_LATENTS | WITH_STATES
OF_EACH_KIND = (
    "qwen3",
    "mistral",
    "gemma4-per-layer",
    "phi4-mini",
    "granite",
    "smollm3",
    "ministral3",
    "gpt-oss",
    "glm4-moe",
    "deepseek-v3",
    "qwen3.5",
    "lfm2",
    "granite4-h",
)
"""A family of each kind: norms of heads, windows, shared keys and inputs of layers, long rotations, multipliers,
layers without rotation, growing queries, sinks, groups of experts beside shared ones, latents, delta nets,
convolutions, scans."""


def by_family(*more: Any) -> list[Any]:
    """Parameters: every family, with each of `more` if there are any. `make test` tries one of each kind."""
    return [
        pytest.param(*values, marks=() if values[0] in OF_EACH_KIND else pytest.mark.slow)
        for values in product(sorted(EVERY_FAMILY), *([more] if more else []))
    ]


MIXTURES = {
    "qwen3-moe",
    "qwen3-moe-raw",
    "mixtral",
    "gpt-oss",
    "glm4-moe",
    "gemma4-experts",
    "qwen3.5-moe",
    "qwen3-next",
    "qwen2-moe",
    "olmoe",
    "lfm2-moe",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm4-moe-lite",
    "granite4-moe",
    "granite4-h-moe",
    "nemotron-h-moe",
}
"""The families with experts."""

_CONFIGURATIONS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
_MODELS = {"GPT2": "GPT2LMHeadModel"}


def configuration(name: str, **changes: Any) -> tuple[str, Any]:
    """The kind of a family, as transformers names it, and its configuration. `changes` override the shape."""
    kind, extra = EVERY_FAMILY[name]
    return kind, getattr(transformers, _CONFIGURATIONS.get(kind, f"{kind}Config"))(**SHAPE | extra | changes)


def build_model(name: str, **changes: Any) -> Any:
    """A random model of transformers whose logits differ enough from each other to be worth comparing.
    `changes` override the shape."""
    kind, config = configuration(name, **changes)
    torch.manual_seed(sum(name.encode()))
    config._attn_implementation = "eager"
    return redrawn(getattr(transformers, _MODELS.get(kind, f"{kind}ForCausalLM"))(config))


def configuration_of(name: str, **changes: Any) -> Any:
    """Of a family, as an object of transformers."""
    return configuration(name, **changes)[1]


def drawn(model: Any, name: str) -> Any:
    """The model with random weights, drawn for this name."""
    torch.manual_seed(sum(name.encode()))
    return redrawn(model)


def redrawn(model: Any) -> Any:
    """The model with the next random weights."""
    model.eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.2
            is_norm = re.search(r"norm(?!.*bias)|\bln_\w+\.weight", parameter_name)
            parameter.normal_(1.0 if is_norm else 0.0, spread)
        for module in model.modules():
            if hasattr(module, "q_norm") and module.scaling == 1.0:  # the trained norm has the scale of scores
                module.q_norm.weight.mul_(module.q_norm.weight.numel() ** -0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.0)
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
                buffer[0] = -10.0  # nobody chooses this expert
    return model


def write_adapter(base: Any, folder: Path, *, seed: int = 0, spread: float = 0.3, **settings: Any) -> Any:
    """`base` with a random adapter of PEFT, saved in `folder`; by default of rank 4, on all linear maps."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(**(settings or {"r": 4, "target_modules": "all-linear"}))
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, spread)
    model.save_pretrained(folder)
    return model
