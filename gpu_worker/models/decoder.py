"""The decoder of Llama, Mistral, Qwen2 and Qwen3: pre-norm attention and gated MLP, T positions at a time.

The T positions of a step belong to several sequences and may be prompts, single tokens or drafts; only the
attention, which the caller passes in, distinguishes them. Queries, keys and values come from one product, gate and
up from another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.layers import Kernels, Linear, Rotation

LinearName = Literal["qkv", "out", "gate_up", "down"]


class ValueDecoder(Protocol):
    """A decoder with `n_values` > 0: it decodes numbers (coordinates, sizes) with each token, and embeds those of
    its input tokens; they are 0 for prompt tokens. Neither method may wait for the device."""

    def embed_values(self, token_ids: Tensor, values: Tensor) -> Tensor:
        """int64 [T], float32 [T, n_values] -> [T, hidden]."""
        ...

    def decode_values(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Hidden states whose logits gave `token_ids`: [O, hidden], int [O] -> float32 [O, n_values]."""
        ...


class Attention(Protocol):
    """One step's attention over the paged KV cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        """Rotate q [T, Hq, D] and k [T, Hkv, D], store k and v [T, Hkv, D] of the step's positions, and return the
        attention output [T, Hq * D]. q may be overwritten."""
        ...


class LinearDeltas(Protocol):
    """The LoRA deltas of a step, added to the output of a linear layer in place."""

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Forward:
    """The arguments of a forward besides its hidden states. positions: int64 [T]."""

    positions: Tensor
    attention: Attention
    deltas: LinearDeltas | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and its forward pass. rotary: see `rotary_table`.

    embedding: [vocab, hidden]; `n_values`: numbers decoded with each token (0 here).
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    rotary: Tensor
    kernels: Kernels
    n_values: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return torch.nn.functional.embedding(token_ids, self.embedding)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        """[T, hidden] -> [T, hidden], without the final norm; `hidden` is overwritten."""
        eps = self.config.rms_norm_eps
        residual = hidden
        x = self.kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            if i:
                x = self.kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self.attend(i, self._apply(i, "qkv", layer.qkv, x, step), step)
            x = self._apply(i, "out", layer.out, x, step)
            x = self.kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._apply(i, "gate_up", layer.gate_up, x, step)
            x = self._apply(i, "down", layer.down, self.kernels.silu_mul(x), step)
        residual += x
        return residual

    def head_output(self, hidden: Tensor) -> Tensor:
        """Final norm and logits: [O, hidden] -> [O, vocab] in the model's dtype."""
        return self.head(self.kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        """Layer i's attention: [T, queries, keys and values] -> [T, q_size]. `qkv` may be overwritten."""
        config, layer, n = self.config, self.layers[i], qkv.shape[0]
        q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        q = q.view(n, config.n_heads, config.head_dim)
        k = k.view(n, config.n_kv_heads, config.head_dim)
        v = v.view(n, config.n_kv_heads, config.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        return step.attention.attend(i, q, k, v, Rotation(norms, config.rms_norm_eps, step.positions, self.rotary))

    def _apply(self, i: int, name: LinearName, linear: Linear, x: Tensor, step: Forward) -> Tensor:
        y = linear(x)
        if step.deltas is not None:
            step.deltas.add(i, name, x, y)
        return y
