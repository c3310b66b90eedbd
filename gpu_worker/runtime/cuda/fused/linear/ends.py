"""What a fused product does before and after its loop over the inputs, for all loops: see `linear.decode`.

A program computes `OUTPUTS` outputs of up to `ROWS` rows, as a block float32 [OUTPUTS, ROWS].
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def outputs_of(width, GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """The outputs of this program, int32 [OUTPUTS]. GATED: the first half of them are gates, the second half their
    factors. width: of a row of results."""
    lane = tl.arange(0, OUTPUTS)
    half: tl.constexpr = OUTPUTS // 2
    if GATED:
        output = tl.program_id(0) * half + lane % half + tl.where(lane < half, 0, width)
    else:
        output = tl.program_id(0) * OUTPUTS + lane
    return output


@triton.jit
def ask_for(lines):
    """Have lines of memory read into the card's cache. lines: pointers of any shape, one a line."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_after_asking_for(lines):
    """Ask for lines of the weights, let the next kernel start, and wait for the previous kernel's outputs."""
    ask_for(lines)
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def squares_of(squares, n, blocks, NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The parts of each row's sum of squares, float32 [ROWS, BLOCKS], read before the loop. squares: [ROWS,
    blocks]."""
    if NORMED:
        row, block = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
        known = (row < n)[:, None] & (block < blocks)[None, :]
        parts = tl.load(squares + row[:, None] * blocks + block[None, :], mask=known, other=0.0)
    else:
        parts = tl.zeros([ROWS, BLOCKS], tl.float32)
    return parts


@triton.jit
def normed(total, parts, inputs, eps):
    """The product of rows that an RMS norm divides, of the product of rows that it does not."""
    return total * tl.rsqrt(tl.sum(parts, 1) / inputs + eps)[None, :]


@triton.jit
def activated(
    total,
    bias,
    output,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """With the bias, and with the activation: [OUTPUTS, ROWS], or half of the outputs if GATED."""
    if BIASED:
        total += tl.load(bias + output).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTPUTS // 2, ROWS]), [1, 2, 0]))
        total = _active(gate, ACTIVATION) * up
    else:
        total = _active(total, ACTIVATION)
    return total


@triton.jit
def _active(x, ACTIVATION: tl.constexpr):
    """See `plan.Activation`."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "none")
    return x


@triton.jit
def note_best(total, y, best, owners, n, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """Write each row's largest result of this program, as it is rounded, and the lowest output that has it. best:
    float32 [n, programs]; owners: int32, alike."""
    row, output = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    value = total.to(y.dtype.element_ty).to(tl.float32)
    largest = tl.max(value, 0)
    owner = tl.min(tl.where(value == largest[None, :], output[:, None], 2147483647), 0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, largest, mask=row < n)
    tl.store(owners + at, owner, mask=row < n)


@triton.jit
def finish(
    total,
    y,
    norm,
    scaled,
    sums,
    n,
    width,
    y_row,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the results; ADDED: add them to what is there, and write what the next norm needs (`FusedResidual`).
    y: [n, width]."""
    stored: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    row, output = tl.arange(0, ROWS), tl.program_id(0) * stored + tl.arange(0, stored)
    there = (row < n)[None, :]
    at = y + row[None, :].to(tl.int64) * y_row + output[:, None]
    if ADDED:
        total += tl.load(at, mask=there, other=0.0).to(tl.float32)
    rounded = total.to(y.dtype.element_ty)
    tl.store(at, rounded, mask=there)
    if ADDED:
        value = rounded.to(tl.float32)
        tl.store(sums + row * (width // OUTPUTS) + tl.program_id(0), tl.sum(value * value, 0), mask=row < n)
        value *= tl.load(norm + output).to(tl.float32)[:, None]
        tl.store(scaled + row[None, :] * width + output[:, None], value.to(scaled.dtype.element_ty), mask=there)
