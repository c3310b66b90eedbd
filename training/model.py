"""A lean Qwen3 for training: one file, no options, the same weights and logits as transformers' Qwen3ForCausalLM.

Parameter names are those of the Hugging Face format, so that export is a plain save.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; field names as in `config.json`."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head_dim], halves rotated as in Llama and Qwen."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Plain products: for rows of a few hundred positions on a CPU, with their gradients, faster than
    `scaled_dot_product_attention`."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        groups = self.heads // self.kv_heads
        keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if mask is None:
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        else:
            out = attended(q, keys, values, mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, past, mask)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """The decoder with its embedding as output layer (tied)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        residual = (2 * shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                narrow = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                fan_in = shape.hidden_size if "embed" in name else weight.shape[1]
                nn.init.normal_(weight, std=narrow * fan_in**-0.5)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        past: Cache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """Final hidden states float32 [batch, length, hidden] of tokens int64 [batch, length], and the new cache.

        `positions` int64 [batch, length] counts from 0 by default; `mask` bool [batch, 1, length, keys] is
        causal by default.
        """
        if positions is None:
            cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        else:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.model.embed_tokens(tokens)
        present: Cache = []
        for index, layer in enumerate(self.model.layers):
            x, kv = layer(x, cos, sin, past[index] if past is not None else None, mask)
            present.append(kv)
        return self.model.norm(x), present

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., vocab] of hidden states [..., hidden]."""
        return F.linear(hidden, self.model.embed_tokens.weight)
