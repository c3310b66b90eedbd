"""Norms that FlashInfer does not compute, in one launch: with weights in float32, and with a gate after them."""

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


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Kernels.gated_rms_norm`: [T, heads, width], in the type of z.

    x: float32 [T, heads, width], contiguous; z: [T, groups, heads / groups * width], with any strides of positions
    and groups; weight: [width], of the type of z, or float32.
    """
    n, heads, width = x.shape
    if len(z) != n or z.shape[1] * z.shape[2] != heads * width or z.shape[2] % width or len(weight) != width:
        shapes = ", ".join(str(list(each.shape)) for each in (x, z, weight))
        raise ValueError(f"outputs, their gates and the weight of their norm: must fit, got {shapes}")
    assert x.is_contiguous()
    assert z.stride(2) == weight.stride(0) == 1
    out = torch.empty((n, heads, width), dtype=z.dtype, device=z.device)
    _gated_rms_norm[(n, heads)](
        x, z, weight, out, z.stride(0), z.stride(1), heads, width, eps,
        EACH=z.shape[2] // width, BLOCK=triton.next_power_of_2(width), num_warps=4 if width > 512 else 1,
    )  # fmt: skip
    return out


@triton.jit
def _gated_rms_norm(x, z, weight, out, z_row, z_group, heads, width, eps, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers are rounded to the model's type where torch rounds them: before the norm, before a weight of that
    type, after the weight, and after the gate."""
    row, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    used = column < width
    kind = out.dtype.element_ty
    at = (row * heads + head) * width + column
    wide = tl.load(x + at, mask=used, other=0.0).to(kind).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=used, other=0.0)
    if weight.dtype.element_ty == kind:
        wide = wide.to(kind).to(tl.float32)
    normed = (wide * factor.to(tl.float32)).to(kind).to(tl.float32)
    gate = tl.load(z + row * z_row + head // EACH * z_group + head % EACH * width + column, mask=used, other=0.0)
    gate = gate.to(tl.float32)
    tl.store(out + at, (normed * (gate / (1.0 + tl.exp(-gate)))).to(kind), mask=used)
