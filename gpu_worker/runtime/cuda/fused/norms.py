"""Norms with weights in float32, which FlashInfer does not compute, in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """x: [T, width], in rows of any stride; weight: float32 [width]. added: [T, width], is added to x in place
    first."""
    n, width = x.shape
    out = torch.empty((n, width), dtype=x.dtype, device=x.device)
    other = x if added is None else added
    _rms_norm[(n,)](
        x,
        other,
        weight,
        out,
        x.stride(0),
        other.stride(0),
        width,
        eps,
        ADDED=added is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width > 512 else 1,
    )
    return out


@triton.jit
def _rms_norm(x, added, weight, out, x_row, added_row, width, eps, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    used = column < width
    value = tl.load(x + row * x_row + column, mask=used, other=0.0)
    if ADDED:
        value += tl.load(added + row * added_row + column, mask=used, other=0.0)
        tl.store(x + row * x_row + column, value, mask=used)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    wide *= tl.load(weight + column, mask=used, other=0.0)
    tl.store(out + row * width + column, wide.to(out.dtype.element_ty), mask=used)
