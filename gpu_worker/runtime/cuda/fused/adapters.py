"""Adds adapters in a decode step on CUDA. Each position reads its own adapter's matrices in place.

    inner[t] = A[slot(t)] · x[t]          y[t] += B[slot(t)] · inner[t]

Nothing is gathered, and of each slot only the rank of its adapter is read. All sums are in float32, in an order
that depends on no other position."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError

_INNER, _INPUTS, _OUTPUTS = 8, 512, 64
"""The size of one program: rows of A, inputs at a time, rows of B."""


def add_terms(x: Tensor, y: Tensor, a: Tensor, b: Sequence[Tensor], slots: Tensor, ranks: Tensor) -> None:
    """y[t] += B[slots[t]] A[slots[t]] x[t], part by part; rows whose slot is 0 stay as they are.

    x: [T, in], y: [T, out], rows dense; a: [n_slots, parts * rank, in]; b[part]: [n_slots, out of the part, rank];
    slots: int32 [T]; ranks: int32 [n_slots], how many rows of each part of A a slot uses.
    """
    assert x.stride(1) == y.stride(1) == 1
    n, width = x.shape
    rows, most = a.shape[1], b[0].shape[2]
    outputs = [matrix.shape[1] for matrix in b]
    if a.shape[2] != width or sum(outputs) != y.shape[1] or rows != len(b) * most:
        of, given = f"{width} inputs and {y.shape[1]} outputs", f"{a.shape[2]} and {sum(outputs)}"
        raise ModelError(f"adapters: must have the {of} of the linear layer, got {given}")
    inner = torch.empty((n, rows), dtype=torch.float32, device=x.device)
    _shrink[(n, triton.cdiv(rows, _INNER))](
        x, a, inner, slots, ranks, x.stride(0), width, rows, most, ROWS=_INNER, BLOCK=_INPUTS, num_warps=4
    )
    first = 0
    for part, (matrix, of_part) in enumerate(zip(b, outputs, strict=True)):
        _expand[(n, triton.cdiv(of_part, _OUTPUTS))](
            inner,
            matrix,
            y,
            slots,
            ranks,
            part * most,
            first,
            rows,
            y.stride(0),
            of_part,
            most,
            ROWS=_OUTPUTS,
            RANK=triton.next_power_of_2(most),
            num_warps=4,
        )
        first += of_part


@triton.jit
def _shrink(x, a, inner, slots, ranks, x_row, width, rows, most, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot > 0:
        row, lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        used = (row < rows) & (row % most < tl.load(ranks + slot))
        if tl.max(used.to(tl.int32), 0) > 0:
            matrix = a + (slot * rows + row[:, None]) * width
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                column = start + lane
                there = column < width
                inputs = tl.load(x + t * x_row + column, mask=there, other=0.0).to(tl.float32)
                weights = tl.load(matrix + column[None, :], mask=used[:, None] & there[None, :], other=0.0)
                total += weights.to(tl.float32) * inputs[None, :]
            tl.store(inner + t * rows + row, tl.sum(total, 1), mask=used)


@triton.jit(do_not_specialize=["part", "first"])
def _expand(
    inner,
    b,
    y,
    slots,
    ranks,
    part,
    first,
    rows,
    y_row,
    outputs,
    most,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot > 0:
        row, lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
        there, rank = row < outputs, tl.load(ranks + slot)
        inputs = tl.load(inner + t * rows + part + lane, mask=lane < rank, other=0.0)
        used = (lane < (rank + 7) // 8 * 8) & (
            lane < most
        )  # whole vectors; elements beyond the rank are multiplied by zeros
        matrix = b + (slot * outputs + row[:, None]) * most
        weights = tl.load(matrix + lane[None, :], mask=there[:, None] & used[None, :], other=0.0)
        at = y + t * y_row + first + row
        total = tl.load(at, mask=there, other=0.0).to(tl.float32)
        total += tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
        tl.store(at, total.to(y.dtype.element_ty), mask=there)
