"""The linear layers of a decode step, with the norms and activations around them, for the few rows of a small
batch.

Such a product takes as long as reading its weights. Every kernel between two products adds a start and an end in
which nothing is read. So here a layer consists of four products and its attention:

    norm ─► qkv ─► attention ─► out, added to the residual ─► norm ─► gate, up ─► silu · mul ─► down, added

Weights are the left operand of the tensor cores, and the rows, padded to 16, the right one. A row's norm is one
factor of all its outputs: its sum of squares is taken while its inputs are read. On Hopper a kernel starts while
the previous kernel ends (programmatic dependent launch), and asks for its first weights before it waits for the
outputs of the previous kernel.

Each program reads all rows. With more than 16 rows it would read as many bytes of rows as of weights; such batches
are for the usual kernels. A row's sums are in float32, in an order that depends on no other row.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.parts.norms import NormWeights, weight_of
from petiole.gpu_worker.models.plan import Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.runtime.cuda.fused.layers import overlapped

MOST_ROWS = 16

_INPUTS = 256
"""Inputs at a time. With fewer, a thread reads less than four bytes of the norm's weight, too few to prefetch."""

_STAGES = 5
"""100 KB on their way to a program. Two programs, mostly of two kernels, share a processor's memory."""

_PROGRAMS = 96
"""The minimum number of programs that read a matrix."""


def fits(decoder: Decoder) -> bool:
    """Whether `forward` can compute this model: dense bfloat16 weights, in whole blocks."""
    linears = [
        linear
        for layer in decoder.layers
        for linear in (layer.attention.qkv, layer.attention.out, layer.dense.gate_up, layer.dense.down)
    ]
    return decoder.dtype == torch.bfloat16 and all(
        isinstance(linear, DenseLinear)
        and linear.weight.is_contiguous()
        and linear.weight.shape[0] % 16 == linear.weight.shape[1] % _INPUTS == 0
        for linear in linears
    )


def forward(decoder: Decoder, hidden: Tensor, step: Forward) -> Tensor:
    """See `Decoder.forward`: at most `MOST_ROWS` rows, of a model that `fits`, without adapters."""
    for i, (plan, layer) in enumerate(zip(decoder.plan.layers, decoder.layers, strict=True)):
        before, behind = (
            _norm(plan.mixer_norm, layer.mixer_norm),
            _norm(plan.feed_forward_norm, layer.feed_forward_norm),
        )
        qkv = product(hidden, layer.attention.qkv, norm=before)
        product(decoder.attend(i, qkv, step), layer.attention.out, add_to=hidden)
        inner = product(hidden, layer.dense.gate_up, norm=behind, gated=True)
        product(inner, layer.dense.down, add_to=hidden)
    return hidden


def _norm(plan: Norm | None, weights: NormWeights | None) -> tuple[Tensor, float]:
    assert plan is not None
    return weight_of(weights), plan.eps


def product(
    x: Tensor,
    linear: Linear,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """y = linear(x), [T, in] -> [T, out], with T up to `MOST_ROWS`.

    `norm`: weight and eps of an RMS norm of x that precedes it. `gated`: silu of the first half of the outputs
    times the second half. `add_to`: y is added to it, in place.
    """
    assert isinstance(linear, DenseLinear)
    weight, bias = linear.weight, linear.bias
    n, (outputs, inputs) = len(x), weight.shape
    width = outputs // 2 if gated else outputs
    y = torch.empty((n, width), dtype=x.dtype, device=x.device) if add_to is None else add_to
    assert n <= MOST_ROWS
    assert x.stride(1) == y.stride(1) == 1
    block = 32 if outputs % 32 == 0 and outputs // 32 >= _PROGRAMS else 16
    scale, eps = norm or (weight, 0.0)
    _product[(outputs // block,)](
        x,
        weight,
        y,
        scale,
        weight if bias is None else bias,
        n,
        inputs,
        width,
        x.stride(0),
        y.stride(0),
        eps,
        NORMED=norm is not None,
        GATED=gated,
        ADDED=add_to is not None,
        BIASED=bias is not None,
        ROWS=MOST_ROWS,
        OUTPUTS=block,
        INPUTS=_INPUTS,
        num_warps=4,
        num_stages=_STAGES,
        **overlapped(x),
    )
    return y


@triton.jit(do_not_specialize=["n"])
def _product(
    x,
    weight,
    y,
    norm,
    bias,
    n,
    inputs,
    width,
    x_row,
    y_row,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row, lane, k = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    half: tl.constexpr = OUTPUTS // 2
    if GATED:  # one half of the block are gates, the other half their factors
        output = tl.program_id(0) * half + lane % half + tl.where(lane < half, 0, width)
    else:
        output = tl.program_id(0) * OUTPUTS + lane
    weights = weight + output.to(tl.int64) * inputs
    if OVERLAPPED:
        lines = weights[:, None] + tl.arange(0, INPUTS // 64)[None, :] * 64
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )
        gdc_launch_dependents()
        gdc_wait()
    there = (row < n)[None, :]
    rows = x + row[None, :] * x_row + k[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, inputs, INPUTS):
        left = tl.load(weights[:, None] + (start + k)[None, :])
        right = tl.load(rows + start, mask=there, other=0.0)
        if NORMED:
            wide = right.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            right = (wide * tl.load(norm + start + k).to(tl.float32)[:, None]).to(right.dtype)
        total = tl.dot(left, right, total)
    if NORMED:
        total *= tl.rsqrt(squares / inputs + eps)[None, :]
    if BIASED:
        total += tl.load(bias + output).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, half, ROWS]), [1, 2, 0]))
        total = gate * tl.sigmoid(gate) * up
        output = tl.program_id(0) * half + tl.arange(0, half)
    at = y + row[None, :].to(tl.int64) * y_row + output[:, None]
    if ADDED:
        total += tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(at, total.to(y.dtype.element_ty), mask=there)
