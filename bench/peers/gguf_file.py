"""A model of random weights as GGUF, for llama.cpp: what it reads of a `config.json`, and tensors of these sizes.

Needs the package `gguf`. Matrices are bfloat16 or float32, or have four bits: all of them (Q4_0), or in gpt-oss
those of its experts (MXFP4), as these models are published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "GptOssForCausalLM": "gpt-oss",
}
_BLOCKS = {"Q4_0": 18, "MXFP4": 17}
"""Bytes of a block of 32 weights: the scale first, then the codes."""


@dataclass(frozen=True)
class _Tensor:
    """shape: outputs last but one, inputs last; a vector has one size."""

    name: str
    shape: tuple[int, ...]
    experts: bool = False
    wide: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether the tensor is float32 in every file."""
        return self.wide or len(self.shape) == 1


def write(raw: Mapping[str, Any], dtype: str, four_bits: bool, path: Path) -> None:
    """raw: a `config.json`. dtype: of what has no four bits."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    name = _NAMES[raw["architectures"][0]]
    quantised = "MXFP4" if name == "gpt-oss" else "Q4_0"
    plain = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    writer = gguf.GGUFWriter(path, name, use_temp_file=True)
    _settings(writer, name, raw)
    dice = np.random.default_rng(0)
    for tensor in _tensors(name, raw):
        kind = "F32" if tensor.is_wide else plain
        if four_bits and not tensor.is_wide and (tensor.experts or quantised == "Q4_0"):
            kind = quantised
        writer.add_tensor(tensor.name, _values(dice, tensor.shape, kind), raw_dtype=kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settings(writer: Any, name: str, raw: Mapping[str, Any]) -> None:
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if name in ("qwen3moe", "gpt-oss"):
        writer.add_expert_count(raw.get("num_experts") or raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(_expert_inner(raw))
    if name == "gpt-oss":
        writer.add_sliding_window(raw["sliding_window"])
    if name == "qwen35":
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(raw["linear_key_head_dim"])
        writer.add_ssm_group_count(raw["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
        writer.add_ssm_inner_size(raw["linear_value_head_dim"] * raw["linear_num_value_heads"])
        writer.add_full_attention_interval(raw["full_attention_interval"])
        writer.add_rope_dimension_count(raw["head_dim"] // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _expert_inner(raw: Mapping[str, Any]) -> int:
    return int(raw.get("moe_intermediate_size") or raw["intermediate_size"])


def _tensors(name: str, raw: Mapping[str, Any]) -> Iterator[_Tensor]:
    hidden, vocab = raw["hidden_size"], raw["vocab_size"]
    yield _Tensor("token_embd.weight", (vocab, hidden))
    yield _Tensor("output_norm.weight", (hidden,))
    if not raw["tie_word_embeddings"]:
        yield _Tensor("output.weight", (vocab, hidden))
    for i in range(raw["num_hidden_layers"]):
        recurrent = name == "qwen35" and (i + 1) % raw["full_attention_interval"]
        mixing = _delta_net(raw) if recurrent else _attention(name, raw)
        feeding = _experts(name, raw) if name in ("qwen3moe", "gpt-oss") else _dense(raw)
        after = "ffn_norm.weight" if name in ("qwen3", "qwen3moe") else "post_attention_norm.weight"
        norms = (_Tensor(one, (hidden,)) for one in ("attn_norm.weight", after))
        for tensor in (*norms, *mixing, *feeding):
            yield _Tensor(f"blk.{i}.{tensor.name}", tensor.shape, tensor.experts, tensor.wide)


def _attention(name: str, raw: Mapping[str, Any]) -> Iterator[_Tensor]:
    hidden, head = raw["hidden_size"], raw["head_dim"]
    heads, kv = raw["num_attention_heads"] * head, raw["num_key_value_heads"] * head
    gated = 2 if name == "qwen35" else 1
    sizes = {"attn_q": (gated * heads, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    for one, (outputs, inputs) in (sizes | {"attn_output": (hidden, heads)}).items():
        yield _Tensor(f"{one}.weight", (outputs, inputs))
        if name == "gpt-oss":
            yield _Tensor(f"{one}.bias", (outputs,))
    if name == "gpt-oss":
        yield _Tensor("attn_sinks.weight", (raw["num_attention_heads"],))
    else:
        yield _Tensor("attn_q_norm.weight", (head,))
        yield _Tensor("attn_k_norm.weight", (head,))


def _delta_net(raw: Mapping[str, Any]) -> Iterator[_Tensor]:
    hidden, n = raw["hidden_size"], raw["linear_num_value_heads"]
    keys = raw["linear_num_key_heads"] * raw["linear_key_head_dim"]
    values = n * raw["linear_value_head_dim"]
    yield _Tensor("attn_qkv.weight", (2 * keys + values, hidden))
    yield _Tensor("attn_gate.weight", (values, hidden))
    yield _Tensor("ssm_conv1d.weight", (2 * keys + values, 4), wide=True)
    yield _Tensor("ssm_dt.bias", (n,))
    yield _Tensor("ssm_a", (n,))
    yield _Tensor("ssm_beta.weight", (n, hidden))
    yield _Tensor("ssm_alpha.weight", (n, hidden))
    yield _Tensor("ssm_norm.weight", (raw["linear_value_head_dim"],))
    yield _Tensor("ssm_out.weight", (hidden, values))


def _dense(raw: Mapping[str, Any]) -> Iterator[_Tensor]:
    hidden, inner = raw["hidden_size"], raw["intermediate_size"]
    yield _Tensor("ffn_gate.weight", (inner, hidden))
    yield _Tensor("ffn_up.weight", (inner, hidden))
    yield _Tensor("ffn_down.weight", (hidden, inner))


def _experts(name: str, raw: Mapping[str, Any]) -> Iterator[_Tensor]:
    hidden, inner = raw["hidden_size"], _expert_inner(raw)
    n = raw.get("num_experts") or raw["num_local_experts"]
    yield _Tensor("ffn_gate_inp.weight", (n, hidden), wide=True)
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for one, (outputs, inputs) in sizes.items():
        yield _Tensor(f"ffn_{one}_exps.weight", (n, outputs, inputs), experts=True)
        if name == "gpt-oss":
            yield _Tensor(f"ffn_{one}_exps.bias", (n, outputs), wide=True)
    if name == "gpt-oss":
        yield _Tensor("ffn_gate_inp.bias", (n,))


def _values(dice: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray[Any, Any]:
    """Random numbers of a deviation of about 0.02; vectors are ones."""
    if kind in _BLOCKS:
        size = _BLOCKS[kind]
        blocks = dice.integers(0, 256, (int(np.prod(shape)) // 32, size), dtype=np.uint8)
        if kind == "Q4_0":
            blocks[:, :2] = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
        else:
            blocks[:, 0] = 127 - 7  # a scale of 2^-7
        return blocks.reshape(*shape[:-1], shape[-1] // 32 * size)
    values = np.ones(shape, np.float32)
    if len(shape) > 1:
        dice.standard_normal(out=values, dtype=np.float32)
        values *= 0.02
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values
