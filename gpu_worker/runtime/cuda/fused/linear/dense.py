"""The product of a few rows with dense weights, and what precedes and follows it (`ends`), in one launch.

Weights are the left operand of the tensor cores, and the rows, padded, the right one. A block of 64 outputs and
more is for the instructions of Hopper's warp groups.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

from petiole.gpu_worker.runtime.cuda.fused.linear.ends import (
    activated,
    finish,
    normed,
    note_best,
    outputs_of,
    squares_of,
    wait_after_asking_for,
)


@triton.jit(do_not_specialize=["n"])
def product(
    x,
    weight,
    y,
    bias,
    squares,
    norm,
    scaled,
    sums,
    best,
    owners,
    n,
    inputs,
    width,
    x_row,
    y_row,
    y_share,
    eps,
    blocks,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
    SHARES: tl.constexpr,
    BEST: tl.constexpr,
):
    """SHARES: the inputs are cut into so many parts, of which each program sums one. y has a result for each part,
    `y_share` numbers apart. BEST: `note_best` of the results."""
    row, k = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    output = outputs_of(width, GATED, OUTPUTS)
    weights = weight + output.to(tl.int64) * inputs
    own = inputs
    if SHARES > 1:
        own = inputs // SHARES // INPUTS * INPUTS
        weights += tl.program_id(1) * own
        x += tl.program_id(1) * own
        y += tl.program_id(1) * y_share
    if OVERLAPPED:
        line = tl.arange(0, EARLY // 64) * 64
        wait_after_asking_for(weights[:, None] + tl.minimum(line, own - 64)[None, :])
    parts = squares_of(squares, n, blocks, NORMED, ROWS, BLOCKS)
    rows = x + row[None, :] * x_row + k[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, own, INPUTS):
        left = tl.load(weights[:, None] + (start + k)[None, :])
        right = tl.load(rows + start, mask=(row < n)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    if NORMED:
        total = normed(total, parts, inputs, eps)
    total = activated(total, bias, output, BIASED, ACTIVATION, GATED, OUTPUTS, ROWS)
    finish(total, y, norm, scaled, sums, n, width, y_row, ADDED, GATED, OUTPUTS, ROWS)
    if BEST:
        note_best(total, y, best, owners, n, OUTPUTS, ROWS)
