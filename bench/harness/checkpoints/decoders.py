"""Shapes with random weights, written on the fly: the values of the weights do not change the speed.

A `Shape` also counts the bytes that a step must read and the operations that it must do. These, and two measured
rates, give its floor on a machine; see `bench.harness.floors`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder with a tied head. Sizes as in Hugging Face's `config.json`. experts: of each layer, each a
    feed-forward of `intermediate_size`, of which a position takes `chosen`; 0: a dense decoder. four_bits: each
    side makes four bits of the checkpoint's layers and head, one scale for 32 inputs."""

    name: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    experts: int = 0
    chosen: int = 0
    four_bits: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What an engine is told beside the checkpoint."""
        quantised = {"weight_quantization": "int4", "head_quantization": "int4"} if self.four_bits else {}
        return {"dtype": self.dtype, **quantised}

    @property
    def layer_parameters(self) -> int:
        return self._layer_parameters(self.experts or 1)

    def _layer_parameters(self, experts: float) -> int:
        """The parameters of a layer with this many feed-forwards, and with its router."""
        attention = self.hidden_size * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        norms, router = 2 * self.hidden_size + 2 * self.head_dim, self.experts * self.hidden_size
        return attention + norms + router + round(experts * 3 * self.hidden_size * self.intermediate_size)

    @property
    def parameters(self) -> int:
        return self.vocab_size * self.hidden_size + self.n_layers * self.layer_parameters + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights. A decode step of a dense decoder reads all: the head is the embedding."""
        return round(self.parameters * self._weight_bytes)

    @property
    def _weight_bytes(self) -> float:
        """The bytes of one weight; in four bits with its share of a scale."""
        return 4.5 / 8 if self.four_bits else _BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * _BYTES[self.dtype]

    def decode_bytes(self, batch: int, context: int) -> int:
        """The bytes that a decode step reads. Of the experts it reads those that at least one sequence takes, if
        all are taken equally often."""
        taken = self.experts * (1 - (1 - self.chosen / self.experts) ** batch) if self.experts else 1
        unread = self.n_layers * (self.layer_parameters - self._layer_parameters(taken))
        weights = self.weight_bytes - unread * self._weight_bytes
        return round(weights) + batch * context * self.kv_bytes_per_token

    def operations(self, tokens: int, context: float, outputs: int) -> float:
        """Multiplications and additions for `tokens` positions that see `context` others each on average."""
        dense = 2 * self.n_layers * self._layer_parameters(self.chosen or 1) * tokens
        attention = 4 * self.n_layers * self.n_heads * self.head_dim * context * tokens
        return dense + attention + 2 * self.vocab_size * self.hidden_size * outputs


QWEN3_06B = Shape("Qwen3-0.6B shape, bf16", "bfloat16", 151_936, 1024, 3072, 28, 16, 8, 128)
QWEN3_06B_INT4 = replace(QWEN3_06B, name="Qwen3-0.6B shape, int4", four_bits=True)
SMALL = Shape("6.8 M shape, fp32", "float32", 8192, 256, 768, 6, 4, 2, 64)
MIXTURE = Shape("22 M mixture, fp32", "float32", 8192, 256, 256, 6, 4, 2, 64, experts=16, chosen=4)
SMALL_LONG = Shape("6.8 M shape, fp32", "float32", 8192, 256, 768, 6, 4, 2, 64, max_positions=20_480)
TINY = Shape("petiole-tiny", "float32", 512, 256, 512, 4, 4, 2, 64)
"""The shape of the model that ships with the project; computed in float32 here, as `bench.engine` sets it."""


@dataclass(frozen=True)
class Described:
    """A model of another family than a `Shape`, from its `config.json`."""

    name: str
    dtype: str
    raw: dict[str, Any]


@contextmanager
def checkpoint(shape: Shape) -> Iterator[str]:
    """A folder with the shape's random checkpoint, removed afterwards. petiole-tiny has its own weights."""
    if shape is TINY:
        yield "petiole-tiny"
        return
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as folder:
        write(shape, Path(folder))
        yield folder


def write(shape: Shape, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype).normal_(0, 0.02, generator=generator)

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.n_heads * head, shape.n_kv_heads * head
    tensors = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden), "model.norm.weight": ones(hidden)}
    for i in range(shape.n_layers):
        layer = {
            "self_attn.q_proj": normal(q, hidden),
            "self_attn.k_proj": normal(kv, hidden),
            "self_attn.v_proj": normal(kv, hidden),
            "self_attn.o_proj": normal(hidden, q),
            "self_attn.q_norm": ones(head),
            "self_attn.k_norm": ones(head),
            "input_layernorm": ones(hidden),
            "post_attention_layernorm": ones(hidden),
        }
        if shape.experts:
            layer["mlp.gate"] = normal(shape.experts, hidden)
        for at in [f"mlp.experts.{e}" for e in range(shape.experts)] or ["mlp"]:
            layer |= {f"{at}.gate_proj": normal(inner, hidden), f"{at}.up_proj": normal(inner, hidden)}
            layer[f"{at}.down_proj"] = normal(hidden, inner)
        tensors |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(shape)))
    write_tokenizer(shape.vocab_size, folder)


def write_adapter(shape: Shape, folder: Path, *, rank: int = 16, seed: int = 0, spread: float = 0.02) -> None:
    """A random LoRA adapter on all projections of every layer, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for i in range(shape.n_layers):
        for name, (outputs, inputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.empty(rank, inputs).normal_(0, spread, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.empty(outputs, rank).normal_(0, spread, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))


def config(shape: Shape) -> dict[str, object]:
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **(mixture if shape.experts else {}),
    }


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a byte-level tokenizer in which every token is a word. So the output of random weights is text, and
    costs as much as text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġ{number:x}" for number in range(vocab_size - len(letters))]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
