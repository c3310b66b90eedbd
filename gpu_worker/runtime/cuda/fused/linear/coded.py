"""Fused products (see `linear.decode`) with codes of four and eight bits, for the few rows of a small batch.

A program's warps share out the inputs: each multiplies every fourth tile of `TILE` inputs, with all outputs of the
program, and the sums of the warps are added at the end, in order. So no code is widened twice, and no warp waits
for another one but for the copies.

Four-bit codes lie in tiles: what a thread multiplies comes in loads of 16 bytes, into the registers from which
tensor cores take it. A scale is read by every thread that multiplies its sums: no value changes its thread in the
loop. Scales that follow are asked for before the loop, and read one block ahead.

Codes are multiplied as they are, exactly; the sums of a group are scaled in float32. A row's sums are in an order
that depends on no other row: neither on which rows there are, nor on their number.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.weights.linear import Fp8Linear, Linear
from petiole.gpu_worker.models.weights.quantized import TILE, Coded, CodeLayout, KernelLinear
from petiole.gpu_worker.runtime.cuda.fused.layers import overlapped
from petiole.gpu_worker.runtime.cuda.fused.linear.codes import (
    CodedWeight,
    assembly,
    assembly_of_bytes,
    eight_numbers,
    factor_of,
    float_of,
    of_bytes,
)
from petiole.gpu_worker.runtime.cuda.fused.linear.ends import (
    activated,
    finish,
    normed,
    outputs_of,
    squares_of,
    wait_after_asking_for,
)

SLICES = 4
"""Warps of a program, and parts of its inputs. For all numbers of rows the same: sums depend on it."""

TILE_INPUTS = tl.constexpr(TILE)


class CodedBlock(NamedTuple):
    """What a program computes at a time: outputs, of so many rows, in this many stages; early: the inputs whose
    codes it asks for before it waits."""

    outputs: int
    rows: int
    stages: int
    early: int = 2048


NARROW, WIDE = 16, 32
"""Outputs of a program of few rows, and of more: it reads all rows, and as many bytes of them as of codes with 16
rows and 64 outputs."""


def weight_of(linear: Linear) -> tuple[Coded, Tensor | None] | None:
    """The codes of a layer, as the kernels of this module read them, and its bias. None: they read no such
    layer."""
    match linear:
        case KernelLinear(weight, bias):
            return (weight, bias) if known(weight.form) and weight.codes.is_contiguous() else None
        case Fp8Linear(weight, scale, _, bias):
            form = CodeLayout(weight.shape[0], weight.shape[1], weight.shape[1], codes=weight.dtype)
            return (Coded(form, weight, scale.view(-1, 1)), bias) if known(form) else None
    return None


def known(form: CodeLayout) -> bool:
    """Whether `launch` multiplies such codes: of a form that has a kernel at all."""
    whole = form.outputs % NARROW == form.inputs % TILE == 0
    if form.table:
        return whole and form.in_tiles
    return whole and form.zeros is None and form.group % TILE == 0


def block_for(rows: int, outputs: int) -> CodedBlock:
    few = rows <= 8
    wide = outputs % WIDE == 0 and (not few or outputs >= 256 * WIDE)
    return CodedBlock(WIDE if wide else NARROW, 8 if few else 16, 5 if few else 4)


def launch(
    block: CodedBlock,
    x: Tensor,
    weight: Coded,
    bias: Tensor | None,
    y: Tensor,
    squares: Tensor | None,
    eps: float,
    then: tuple[Tensor, Tensor, Tensor] | None,
    activation: str,
    gated: bool,
) -> None:
    """y = weight x + bias, with what precedes and follows it: see `linear.decode`. x: [T, in], T up to the rows of
    the block. squares: of a residual that a norm divides. then: what the next norm needs, written as in
    `ends.finish`: norm, scaled, sums; the product is added to y."""
    form, stored = weight.form, CodedWeight.of(weight)
    norm, scaled, sums = (y, y, y) if then is None else then
    assert len(x) <= block.rows
    assert x.stride(1) == y.stride(1) == 1
    assert form.outputs % block.outputs == 0
    unit = SLICES * TILE
    row_words = form.inputs // 8 if stored.of_four_bits else form.inputs
    coded_product[(form.outputs // block.outputs,)](
        x,
        stored.codes,
        stored.scales,
        stored.zeros,
        stored.multiplier,
        y,
        y if bias is None else bias,
        y if squares is None else squares,
        norm,
        scaled,
        sums,
        len(x),
        form.inputs,
        row_words,
        form.groups,
        y.shape[1],
        x.stride(0),
        y.stride(0),
        eps,
        1 if squares is None else squares.shape[1],
        NORMED=squares is not None,
        ACTIVATION=activation,
        GATED=gated,
        ADDED=then is not None,
        BIASED=bias is not None,
        ALIGNED=form.inputs % unit == 0,
        ROWS=block.rows,
        OUTPUTS=block.outputs,
        SLICES=SLICES,
        BLOCKS=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
        EARLY=block.early,
        ASSEMBLY=assembly(stored.kind, x.dtype) or assembly_of_bytes(stored.kind, x.dtype),
        num_warps=SLICES,
        num_stages=block.stages,
        **stored.constants,
        **overlapped(x),
    )


@triton.jit(do_not_specialize=["n"])
def coded_product(
    x,
    codes,
    scales,
    zeros,
    multiplier,
    y,
    bias,
    squares,
    norm,
    scaled,
    sums,
    n,
    inputs,
    row_words,
    groups,
    width,
    x_row,
    y_row,
    eps,
    blocks,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    four: tl.constexpr = KIND < 4
    words: tl.constexpr = TILE_INPUTS // 8 if four else TILE_INPUTS  # of a tile
    each: tl.constexpr = 8 if GROUP == 16 else 4 if GROUP == 32 else 2 if GROUP == 64 else 1  # groups of a tile
    row, part = tl.arange(0, ROWS), tl.arange(0, SLICES)
    output = outputs_of(width, GATED, OUTPUTS)
    at = codes + (output.to(tl.int64) * row_words)[None, :, None]
    at += (part * words)[:, None, None] + tl.arange(0, words)[None, None, :]
    # Of 16 outputs a thread has two, and four neighbours have the same ones: a dimension for each of these.
    of_threads = tl.reshape(output, [OUTPUTS // 8, 1, 8, 1, 1]).to(tl.int64) * groups
    of_threads = tl.broadcast_to(of_threads, [OUTPUTS // 8, SLICES, 8, 4, each])
    if OVERLAPPED:
        line = tl.arange(0, EARLY // (4 * words)) * 32 if four else tl.arange(0, EARLY // TILE_INPUTS) * TILE_INPUTS
        wait_after_asking_for(
            codes + (output.to(tl.int64) * row_words)[:, None] + tl.minimum(line, row_words - 1)[None, :]
        )
    parts = squares_of(squares, n, blocks, NORMED, ROWS, BLOCKS)
    k = part[:, None, None] * TILE_INPUTS + tl.arange(0, TILE_INPUTS)[None, :, None]
    rows = x + (row * x_row)[None, None, :]
    total = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    tiles = inputs // TILE_INPUTS
    scale, zero = of_threads, of_threads
    if GROUP > 0:
        scale = _load_groups(scales, of_threads, 0, part, tiles, GROUP, each, SLICES)
    if ZEROS:
        zero = _load_groups(zeros, of_threads, 0, part, tiles, GROUP, each, SLICES)
    for first in range(0, tiles, SLICES):
        next_scale, next_zero = scale, zero
        if GROUP > 0:
            next_scale = _load_groups(scales, of_threads, first + SLICES, part, tiles, GROUP, each, SLICES)
            if ZEROS:
                next_zero = _load_groups(zeros, of_threads, first + SLICES, part, tiles, GROUP, each, SLICES)
        there = (row < n)[None, None, :]
        if ALIGNED:
            found = tl.load(at + first * words)
        else:
            known = (first + part < tiles)[:, None, None]
            there = there & known
            found = tl.load(at + first * words, mask=known, other=0)
        begin = rows + first * TILE_INPUTS
        if four:
            total = _add_four_bits(
                total, begin, found, scale, zero, part, there,
                OUTPUTS, ROWS, SLICES, each, KIND, OF_SCALES, GROUP, ZEROS, ASSEMBLY,
            )  # fmt: skip
        else:
            right = tl.load(begin + k, mask=there, other=0.0)
            left = of_bytes(found, right.dtype, KIND, ASSEMBLY)
            if GROUP > 0:
                total += _times(tl.dot(left, right), scale, 0, each, OF_SCALES, SLICES, OUTPUTS, ROWS)
            else:
                total = tl.dot(left, right, total)
        scale, zero = next_scale, next_zero
    sum_ = tl.sum(total, 0)
    if GROUP == 0:
        sum_ *= float_of(tl.load(scales + output), OF_SCALES)[:, None]
    sum_ *= factor_of(multiplier, output, MULTIPLIED)[:, None]
    if NORMED:
        sum_ = normed(sum_, parts, inputs, eps)
    sum_ = activated(sum_, bias, output, BIASED, ACTIVATION, GATED, OUTPUTS, ROWS)
    finish(sum_, y, norm, scaled, sums, n, width, y_row, ADDED, GATED, OUTPUTS, ROWS)


@triton.jit
def _load_groups(
    numbers, of_threads, first, part, tiles, GROUP: tl.constexpr, each: tl.constexpr, SLICES: tl.constexpr
):
    """The scales or the zeros of one tile of each slice, [outputs / 8, slices, 8, 4, each]."""
    at = numbers + of_threads
    if GROUP > 0:
        tile = tl.minimum(first + part, tiles - 1)
        group = tile * each if GROUP <= TILE_INPUTS else tile // (GROUP // TILE_INPUTS)
        at += tl.reshape(group, [1, SLICES, 1, 1, 1])
        at += tl.reshape(tl.arange(0, each), [1, 1, 1, 1, each])
    return tl.load(at)


@triton.jit
def _column(of_groups, HALF: tl.constexpr, each: tl.constexpr):
    """Of the groups of a tile those of the HALF-th 16 inputs, [outputs / 8, slices, 8, 4]."""
    o: tl.constexpr = of_groups.shape[0]
    s: tl.constexpr = of_groups.shape[1]
    group: tl.constexpr = HALF * each // 8
    if each == 1:
        found = tl.reshape(of_groups, [o, s, 8, 4])
    elif each == 2:
        low, high = tl.split(of_groups)
        found = high if group == 1 else low
    elif each == 4:
        even, odd = tl.split(tl.reshape(of_groups, [o, s, 8, 4, 2, 2]))
        low, high = tl.split(odd if group % 2 == 1 else even)
        found = high if group // 2 == 1 else low
    else:
        even, odd = tl.split(tl.reshape(of_groups, [o, s, 8, 4, 4, 2]))
        even, odd = tl.split(tl.reshape(odd if group % 2 == 1 else even, [o, s, 8, 4, 2, 2]))
        low, high = tl.split(odd if group // 2 % 2 == 1 else even)
        found = high if group // 4 == 1 else low
    return found


@triton.jit
def _times(
    part,
    of_groups,
    HALF: tl.constexpr,
    each: tl.constexpr,
    BITS: tl.constexpr,
    SLICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """part: [slices, outputs, rows], times what its outputs' groups have."""
    number = tl.permute(float_of(_column(of_groups, HALF, each), BITS), (1, 0, 2, 3))
    number = tl.reshape(number, [SLICES, OUTPUTS // 8, 8, 1, 4, 1])
    in_threads = tl.reshape(part, [SLICES, OUTPUTS // 8, 8, ROWS // 8, 4, 2])
    return tl.reshape(in_threads * number, [SLICES, OUTPUTS, ROWS])


@triton.jit
def _add_four_bits(
    total,
    rows,
    words,
    scale,
    zero,
    slices,
    there,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    each: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """total and the products of a tile of each slice, [slices, outputs, rows]. words: [slices, outputs, 16]."""
    even, odd = tl.split(tl.reshape(words, [SLICES, OUTPUTS, 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    runs = (a, b, c, d)
    part, sums = total, total
    for i in tl.static_range(4):
        first, second = _sixteens(runs[i], rows.dtype.element_ty, KIND, ASSEMBLY, SLICES, OUTPUTS)
        if GROUP == 16:
            total, part, sums = _add_part(
                total, part, sums, first, rows, scale, zero, slices, there,
                2 * i, 16, each, OF_SCALES, GROUP, ZEROS, OUTPUTS, ROWS, SLICES,
            )  # fmt: skip
            total, part, sums = _add_part(
                total, part, sums, second, rows, scale, zero, slices, there,
                2 * i + 1, 16, each, OF_SCALES, GROUP, ZEROS, OUTPUTS, ROWS, SLICES,
            )  # fmt: skip
        else:
            both = tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), [SLICES, OUTPUTS, 32])
            total, part, sums = _add_part(
                total, part, sums, both, rows, scale, zero, slices, there,
                i, 32, each, OF_SCALES, GROUP, ZEROS, OUTPUTS, ROWS, SLICES,
            )  # fmt: skip
    return total


@triton.jit
def _add_part(
    total,
    part,
    sums,
    left,
    rows,
    scale,
    zero,
    slices,
    there,
    AT: tl.constexpr,
    K: tl.constexpr,
    each: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """The AT-th K inputs of a tile. part, sums: of the group so far, of codes times inputs and of inputs; at the
    group's end they are added to the total."""
    of_group: tl.constexpr = 128 // K // each
    half: tl.constexpr = K // 16 * AT
    k = slices[:, None, None] * TILE_INPUTS + K * AT + tl.arange(0, K)[None, :, None]
    right = tl.load(rows + k, mask=there, other=0.0)
    if GROUP == 0 and not ZEROS:
        total = tl.dot(left, right, total)
    else:
        ones = tl.full([SLICES, OUTPUTS, K], 1, rows.dtype.element_ty)
        if AT % of_group == 0:
            part = tl.dot(left, right)
            sums = tl.dot(ones, right) if ZEROS else part
        else:
            part = tl.dot(left, right, part)
            sums = tl.dot(ones, right, sums) if ZEROS else part
        if AT % of_group == of_group - 1:
            if ZEROS:
                part -= _times(sums, zero, half, each, 0, SLICES, OUTPUTS, ROWS)
            if GROUP > 0:
                part = _times(part, scale, half, each, OF_SCALES, SLICES, OUTPUTS, ROWS)
            total += part
    return total, part, sums


@triton.jit
def _sixteens(words, dtype: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr, SLICES: tl.constexpr, OUTPUTS: tl.constexpr):
    """Words of runs, [slices, outputs, 4] -> the numbers of the first and the last 16 inputs of each."""
    a, b, c, d, e, f, g, h = eight_numbers(words, dtype, KIND, ASSEMBLY)
    return _sixteen(a, b, c, d, SLICES, OUTPUTS), _sixteen(e, f, g, h, SLICES, OUTPUTS)


@triton.jit
def _sixteen(a, b, c, d, SLICES: tl.constexpr, OUTPUTS: tl.constexpr):
    """The numbers of pairs of inputs, [slices, outputs, 4] each -> [slices, outputs, 16]."""
    first, second = tl.reshape(tl.join(a, b), [SLICES, OUTPUTS, 8]), tl.reshape(tl.join(c, d), [SLICES, OUTPUTS, 8])
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), [SLICES, OUTPUTS, 16])
