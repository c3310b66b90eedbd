"""The components of a decoder layer: linear layers for each weight format, and the element-wise kernels.

A decoder uses the `Linear` and `Kernels` interfaces. Their implementation (torch here, FlashInfer on CUDA, native
code on a CPU) is selected once, when the runtime is created.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x Wᵀ + b for x [T, in] -> [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """weight: [out, in]; bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """8-bit integer weights with one scale per output; inputs and outputs are not quantized.

    weight: int8 [out, in]; scale: [out] in the activations' dtype.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.contiguous(), self.weight, self.scale)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """8-bit float weights (e4m3) with one scale per output; inputs are quantized with one scale per position.

    weight: float8 [out, in]; scale: float32 [1, out]. CUDA only. quantize_rows: see `Kernels`.
    """

    weight: Tensor
    scale: Tensor
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        values, scale = self.quantize_rows(x)
        y: Tensor = torch._scaled_mm(
            values,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            out_dtype=torch.bfloat16,  # the only one with a scale for each row
            use_fast_accum=True,
        )
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


FP8_MAX = 448.0


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Per output channel: (float8_e4m3 [out, in], float32 [out])."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / FP8_MAX
    return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric, per output channel: (int8 [out, in], float32 [out])."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


@dataclass(frozen=True, slots=True)
class Rotation:
    """The transformation of queries and keys before attention: per-head norm, if the model has one, then rotary
    embedding.

    norms: weights [D] of the queries' norm and of the keys'; table: see `rotary_table`; positions: integers [T],
    rows of the table. A decoder whose positions have several axes makes a table of its own for each step.
    """

    norms: tuple[Tensor, Tensor] | None
    eps: float
    positions: Tensor
    table: Tensor

    def __post_init__(self) -> None:
        if self.positions.dim() != 1:
            raise ValueError(f"rotary positions: must be of one axis, got {list(self.positions.shape)}")


class Kernels(Protocol):
    """The element-wise parts of a decoder layer, each one pass over its input where the device can."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, then its norm."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of the last dimension, times the second half."""
        ...

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(float8_e4m3fn [T, in], float32 [T, 1]) whose product is x [T, in]."""
        ...


class TorchKernels:
    """Plain torch: runs anywhere, and is the reference for the other kernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return _rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = quantize_fp8(x)
        return values, scale[:, None]


def rotated(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D], in plain torch."""
    if rotation.norms is not None:
        q_norm, k_norm = rotation.norms
        q, k = _rms_norm(q, q_norm, rotation.eps), _rms_norm(k, k_norm, rotation.eps)
    cos, sin = rotation.table[rotation.positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
