"""Architectures of GGUF files: where Hugging Face's checkpoints keep the same tensors, and what llama.cpp's
converter has changed in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_LAYER = {
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
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
FREQUENCIES = "rope_freqs.weight"
"""What the frequencies of the rotation are divided by, where they are scaled as in Llama 3.1."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same, where they depend on the length."""

_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.([\w.]+)\.(weight|bias)")
_NAME = re.compile(r"([\w.]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of Hugging Face, or one of several that the file has as one. which: of them."""

    name: str
    which: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """hub: as config.json names it. whole, layer: names of tensors, and of a layer's; {} stands for an expert.
    before: the names of layers. turned: the rows of queries and keys are in the order of rotated pairs.
    norms_with_one: norms are stored as 1 + w."""

    hub: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    whole: Mapping[str, str] = field(default_factory=lambda: _WHOLE)
    before: str = "model.layers.{}."
    turned: bool = False
    norms_with_one: bool = False

    def places(self, name: str, n: int) -> Iterator[Place]:
        """Where Hugging Face's checkpoints keep a tensor whose outermost size is n; nowhere if there is none."""
        within, found = _IN_LAYER.fullmatch(name), _NAME.fullmatch(name)
        if within is not None:
            layer, part, kind = within.groups()
            at = self.layer.get(f"{part}.{kind}") or _with(self.layer.get(part), kind)
            if at is not None:
                at = self.before.format(int(layer)) + at
        else:
            at = found and _with(self.whole.get(found[1]), found[2])
        if at and "{}" in at:
            yield from (Place(at.format(i), i) for i in range(n))
        elif at:
            yield Place(at)

    def order(self, name: str) -> str | None:
        """Whose heads the rows of this tensor of Hugging Face belong to: "q", "k", or None where the rows are as
        they are."""
        found = re.search(r"\.self_attn\.([qk])_proj\.", name)
        return found[1] if self.turned and found else None


def _with(name: str | None, kind: str) -> str | None:
    return None if name is None else f"{name}.{kind}"


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
_OLMO2 = Architecture("Olmo2ForCausalLM", layer=_LAYER | _NORMS | _OUT_NORMS)
OLMO3 = replace(_OLMO2, hub="Olmo3ForCausalLM")
"""`olmo2` with windows."""
_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    layer=_LAYER | _OUT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    norms_with_one=True,
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        layer=_LAYER
        | _EXPERTS
        | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", layer=_LAYER | _NORMS),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", layer=_LAYER | _NORMS | _EXPERTS),
    "gemma": Architecture("GemmaForCausalLM", norms_with_one=True),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, hub="Gemma3ForCausalLM", layer={**_GEMMA2.layer, **_NORMS}),
    "phi3": Architecture(
        "Phi3ForCausalLM", layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "granite": replace(_LLAMA, hub="GraniteForCausalLM"),
    "smollm3": replace(_LLAMA, hub="SmolLM3ForCausalLM"),
    "olmo2": _OLMO2,
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", layer=_LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        layer=_LAYER
        | _NORMS
        | _EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
    ),
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
    "lfm2": Architecture(
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
    ),
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
"""By `general.architecture`."""
