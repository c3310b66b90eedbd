"""Linear layers, a class for each way to store their weights."""

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

    def write(self, x: Tensor, out: Tensor) -> None:
        """out = y, [T, out]."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """A product whose inputs and outputs have bounds, each of one number. weight: [out, in]."""

    weight: Tensor
    input_low: Tensor
    input_high: Tensor
    output_low: Tensor
    output_high: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x.clamp(self.input_low, self.input_high), self.weight)
        return y.clamp(self.output_low, self.output_high)


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
class JoinedLinear:
    """The outputs of several layers, one after the other, where these are not stored alike."""

    parts: tuple[Linear, ...]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([part(x) for part in self.parts], -1)
        return y if self.bias is None else y + self.bias


QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x [T, in] -> (float8_e4m3fn [T, in], float32 [T, 1]) whose product is x."""


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """8-bit float weights (e4m3) with one scale per output; inputs are quantized with one scale per position.

    weight: float8 [out, in]; scale: float32 [1, out]. CUDA only.
    """

    weight: Tensor
    scale: Tensor
    quantize_rows: QuantizeRows
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
