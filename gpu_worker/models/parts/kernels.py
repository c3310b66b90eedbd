"""What a decoder computes beside its plain products and its attention. Torch computes here, FlashInfer and Triton
on CUDA; chosen when a runtime is created."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.routing import route
from petiole.gpu_worker.models.plan import FeedForward, Router
from petiole.gpu_worker.models.weights.linear import quantize_fp8
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout, Product
from petiole.gpu_worker.models.weights.stacked import StackedLinear


class Kernels(Protocol):
    """Norms and activations, each one pass over its input where the device can; products with codes; experts. The
    bodies are torch's."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension. weight: of the type of x, or float32."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, then its norm."""
        residual += x
        return rms_norm(residual, weight, eps)

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of each head of x, rounded to the type of z, times silu(z), in that type: [T, heads, width]. x:
        float32 [T, heads, width], contiguous; z: a view [T, groups, heads / groups * width]; weight: [width], of
        the type of z, or float32."""
        y = rms_norm(x.to(z.dtype), weight, eps).float() * F.silu(z.float()).reshape(x.shape)
        return y.to(z.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of the last dimension, times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(float8_e4m3fn [T, in], float32 [T, 1]) whose product is x [T, in]."""
        values, scale = quantize_fp8(x)
        return values, scale[:, None]

    def held(self, form: CodeLayout) -> CodeLayout:
        """The form in which weights of a form are kept: theirs, or another one that holds them exactly and has a
        kernel."""
        return form

    @property
    def codes_of_tokens(self) -> bool:
        """Whether an embedding may be codes."""
        return True

    def take(self, weight: Coded) -> tuple[Coded, Product] | None:
        """The weight in the order in which a kernel reads it, in the same memory, and what multiplies with it.
        None: torch does, with codes that it widens."""
        return None

    def multiply_wide(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] times [out, in] -> float32 [T, out], from products and sums in float32."""
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def choose_experts(
        self, plan: Router, logits: Tensor, correction: Tensor | None, scales: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`parts.routing.route`; positions that are not `real`, bool [T], take experts beyond the last one."""
        chosen, shares = route(plan, logits, correction, scales)
        return chosen if real is None else torch.where(real[:, None], chosen, plan.experts), shares

    def mix_experts(
        self,
        plan: FeedForward,
        up: StackedLinear,
        down: StackedLinear,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        taken: Tensor,
    ) -> Tensor | None:
        """`parts.experts.mixed_experts` in a few launches that wait for nothing. Experts beyond the last one are
        none. taken: int64 [experts]; the positions of each expert are added. None: such weights are for torch."""
        return None


class TorchKernels(Kernels):
    """Plain torch: runs anywhere, and is the reference for the other kernels."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """A float32 weight multiplies before rounding, a weight of the type of x after it, as in transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (weight * wide).to(x.dtype)
