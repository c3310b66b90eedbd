"""Architectures of GGUF files: where Hugging Face's checkpoints keep the same tensors, and what llama.cpp's
converter has changed in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

Named = dict[str, str | tuple[str, ...]]
_LAYER: Named = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS: Named = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUT_NORMS: Named = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Named = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_BESIDE: Named = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""The tensors of the expert that every position takes."""
_BESIDE_GLM: Named = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENTS: Named = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""Older files have `attn_kv_b`, newer ones its two parts."""
_DELTA_NET: Named = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SCAN: Named = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
"""Mamba-2."""
_WHOLE: Named = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
FREQUENCIES = "rope_freqs.weight"
"""What the frequencies of the rotation are divided by, where they are scaled as in Llama 3.1."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same, where they depend on the length."""

_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.([\w.]+)")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of Hugging Face: part `which` of the equal `parts` of a tensor of the file. by_heads: the parts
    take turns, head by head."""

    name: str
    which: int = 0
    parts: int = 1
    by_heads: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """hub: as config.json names it. whole, layer: names of tensors, and of a layer's; {} stands for an expert, and
    several names share one tensor: each expert's, or each head's.
    before: the names of layers. turned: the rows of queries and keys are in the order of rotated pairs.
    norms_with_one: norms are stored as 1 + w."""

    hub: str
    layer: Named = field(default_factory=lambda: _LAYER)
    whole: Named = field(default_factory=lambda: _WHOLE)
    before: str = "model.layers.{}."
    turned: bool = False
    norms_with_one: bool = False

    def places(self, name: str, n: int) -> Iterator[Place]:
        """Where Hugging Face's checkpoints keep a tensor whose outermost size is n; nowhere if there is none."""
        within = _IN_LAYER.fullmatch(name)
        names = _named(self.whole, name) if within is None else _named(self.layer, within[2])
        before = "" if within is None else self.before.format(int(within[1]))
        of_experts = any("{}" in one for one in names)
        for i in range(n if of_experts else 1):
            for k, one in enumerate(names):
                parts = len(names) * (n if of_experts else 1)
                yield Place(before + one.format(i), i * len(names) + k, parts, parts > 1 and not of_experts)

    def order(self, name: str) -> str | None:
        """The heads to which the rows of this tensor of Hugging Face belong: "q", "k", or None where the rows are
        as they are."""
        found = re.search(r"\.self_attn\.([qk])_proj\.", name)
        return found[1] if self.turned and found else None


def _named(names: Named, name: str) -> Sequence[str]:
    """What a tensor is named, with the kind of its numbers if `names` does not name it whole."""
    if name in names:
        found, end = names[name], ""
    else:
        part, dot, kind = name.rpartition(".")
        found, end = names.get(part, ()) if kind in ("weight", "bias") else (), dot + kind
    return [one + end for one in ([found] if isinstance(found, str) else found)]


_LLAMA = Architecture("LlamaForCausalLM", turned=True)
MIXTRAL = replace(
    _LLAMA,
    hub="MixtralForCausalLM",
    layer=_LAYER
    | {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
"""`llama` with experts."""
DEEPSEEK2 = Architecture("DeepseekV2ForCausalLM", layer=_LAYER | _LATENTS | _EXPERTS | _BESIDE_GLM)
DEEPSEEK3 = replace(DEEPSEEK2, hub="DeepseekV3ForCausalLM")
"""`deepseek2` whose experts are scored by a sigmoid; GLM-4.7-Flash computes the same."""
_OLMO2 = Architecture("Olmo2ForCausalLM", layer=_LAYER | _NORMS | _OUT_NORMS)
OLMO3 = replace(_OLMO2, hub="Olmo3ForCausalLM")
"""`olmo2` with windows."""
_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    layer=_LAYER | _OUT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    norms_with_one=True,
)
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    layer=_LAYER
    | {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    whole=_WHOLE | {"token_embd_norm": "model.embedding_norm"},
)
_COMMAND_R = Architecture("CohereForCausalLM")
_GEMMA3_LAYER: Named = {**_GEMMA2.layer, **_NORMS}
_NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    layer={
        **{key: f"mixer.{name}" for key, name in _SCAN.items()},
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    whole={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    before="backbone.layers.{}.",
)
_QWEN2 = Architecture("Qwen2ForCausalLM")
_QWEN3 = Architecture("Qwen3ForCausalLM", layer=_LAYER | _NORMS)
_QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", layer=_LAYER | _NORMS | _EXPERTS)
_QWEN35_MOE = Architecture(
    "Qwen3_5MoeForCausalLM",
    layer={
        **{key: name for key, name in _LAYER.items() if key != "ffn_norm"},
        **_NORMS,
        **_EXPERTS,
        **_BESIDE,
        **_DELTA_NET,
        "post_attention_norm": "post_attention_layernorm",
    },
    norms_with_one=True,
)
"""Qwen3-Next's layers are the same, once its projections are in parts."""

ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen2vl": _QWEN2,
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        layer=_LAYER | _EXPERTS | _BESIDE,
    ),
    "qwen3": _QWEN3,
    "qwen3vl": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen3next": _QWEN35_MOE,
    "qwen35": replace(_QWEN35_MOE, hub="Qwen3_5ForCausalLM"),
    "qwen35moe": _QWEN35_MOE,
    "gemma": Architecture("GemmaForCausalLM", norms_with_one=True),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, hub="Gemma3ForCausalLM", layer=_GEMMA3_LAYER),
    "gemma-embedding": replace(
        _GEMMA2,
        hub="Gemma3TextModel",
        layer=_GEMMA3_LAYER,
        whole=_WHOLE | {"dense_2": "dense_2", "dense_3": "dense_3"},
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        layer={
            **_GEMMA2.layer,
            **_NORMS,
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
            "ffn_down_exps": "experts.{}.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        whole={
            **_WHOLE,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        layer=_LAYER
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        whole=_WHOLE | {"output_norm": "model.final_layernorm"},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.qkv",
            "attn_output": "attn.out",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.up",
            "ffn_down": "mlp.down",
        },
        whole={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        before="h.{}.",
    ),
    "mistral3": replace(_LLAMA, hub="Ministral3ForCausalLM"),
    "granite": replace(_LLAMA, hub="GraniteForCausalLM"),
    "granitehybrid": replace(
        _LLAMA,
        hub="GraniteMoeHybridForCausalLM",
        layer={
            **_LAYER,
            **{key: f"mamba.{name}" for key, name in _SCAN.items()},
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
        },
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "smollm3": replace(_LLAMA, hub="SmolLM3ForCausalLM"),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", layer=_LAYER | {"post_attention_norm": "post_attention_layernorm"}
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "exaone4": replace(_OLMO2, hub="Exaone4ForCausalLM"),
    "olmo2": _OLMO2,
    "olmoe": Architecture("OlmoeForCausalLM", layer=_LAYER | _NORMS | _EXPERTS),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", layer=_LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "chatglm": Architecture(
        "GlmForCausalLM", layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        layer=_LAYER
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        layer=_LAYER | _NORMS | _EXPERTS | _BESIDE_GLM | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "deepseek2": DEEPSEEK2,
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        layer=_LAYER
        | _EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        },
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        hub="Lfm2MoeForCausalLM",
        layer=_LFM2.layer
        | {
            "exp_probs_b.bias": "feed_forward.expert_bias",
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
        },
    ),
    "command-r": _COMMAND_R,
    "cohere2": replace(_COMMAND_R, hub="Cohere2ForCausalLM"),
    "bert": Architecture(
        "BertModel",
        layer={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        whole={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        before="encoder.layer.{}.",
    ),
    "modern-bert": Architecture(
        "ModernBertModel",
        layer={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        whole={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
        },
        before="layers.{}.",
    ),
    "nomic-bert": Architecture(
        "NomicBertModel",
        layer={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_gate": "mlp.fc12",
            "ffn_up": "mlp.fc11",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        whole={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
        },
        before="encoder.layers.{}.",
    ),
}
"""By `general.architecture`. Of models that see, the file has the part that writes."""
