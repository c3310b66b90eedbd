"""Fused products (see `linear.decode`) with codes of four and eight bits, for the few rows of a small batch.

A program's warps share out the inputs: each multiplies every fourth tile of `TILE` inputs, with all outputs of the
program, and the sums of the warps are added at the end, in order. So no code is widened twice, and no warp waits
for another one but for the copies.

Four-bit codes lie in tiles: what a thread multiplies comes in loads of 16 bytes, into the registers from which
tensor cores take it. A scale is read by every thread that multiplies its sums: no value changes its thread in the
loop. Scales that follow are asked for before the loop, and read one block ahead.

Codes are multiplied as they are, exactly; the sums of a group are scaled in float32. A row's sums are in an order
that depends on no other row, beside up to 8 rows, 9 to 16, or 17 to 64.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from petiole.gpu_worker.models.weights.linear import Fp8Linear, Linear
from petiole.gpu_worker.models.weights.quantized import TILE, Coded, CodeLayout, KernelLinear
from petiole.gpu_worker.runtime.cuda.fused.layers import has_small_memory, overlapped
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
    ask_for,
    finish,
    normed,
    outputs_of,
    squares_of,
    wait_after_asking_for,
)

TILE_INPUTS = tl.constexpr(TILE)


class CodedBlock(NamedTuple):
    """What a program computes at a time: outputs, of so many rows, in this many stages, by so many warps. slices:
    into how many parts its inputs are cut, one a warp; 1: each warp has outputs of its own. early: inputs whose
    codes it asks for before it waits."""

    outputs: int
    rows: int
    stages: int
    slices: int = 4
    warps: int = 4
    early: int = 2048


NARROW = 16
"""Outputs of the smallest block."""

BLOCKS: dict[str, tuple[CodedBlock, CodedBlock, CodedBlock]] = {
    "narrow": (CodedBlock(16, 8, 5), CodedBlock(16, 16, 4), CodedBlock(64, 64, 3, 1)),
    "middle": (CodedBlock(32, 8, 4), CodedBlock(32, 16, 4), CodedBlock(64, 64, 4, 1)),
    "wide": (CodedBlock(64, 8, 4), CodedBlock(64, 16, 3), CodedBlock(128, 64, 4, 1, 8)),
}
"""Candidates, which no card has timed: `bench.gpu --only codes` measures all. Of each, the block for up to 8 rows,
for up to 16 and for more. Slices are the same for all up to 16 rows, because the order of sums depends on them."""

MOST_ROWS = 64

PROGRAMS, MOST_SHARES, LEAST_TILES = 256, 8, 4
"""Products of many rows with fewer programs share out their inputs, of which each program has some tiles."""


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
    """By these numbers alone."""
    many = outputs >= 8192
    if rows > 16:
        found = BLOCKS["wide" if many else "middle"][2]
    elif rows > 8:
        found = BLOCKS["wide" if many else "middle"][1]
    else:
        found = BLOCKS["middle" if many else "narrow"][0]
    while outputs % found.outputs:
        found = found._replace(outputs=found.outputs // 2)
    return found if found.outputs > 64 else found._replace(warps=4)


def shares_for(block: CodedBlock, form: CodeLayout) -> int:
    """How many programs share out the inputs of each output: by the weight's sizes alone."""
    n, tiles = 1, form.inputs // TILE
    while (
        block.slices == 1
        and form.outputs // block.outputs * n < PROGRAMS
        and n < MOST_SHARES
        and tiles // (2 * n) >= LEAST_TILES
    ):
        n *= 2
    return n


def _stages(block: CodedBlock, form: CodeLayout, *, small: bool) -> int:
    """Those of the block, or as many as fit: into 99 KiB, or twice into a multiprocessor of Hopper."""
    rows = 2 * block.slices * TILE * block.rows
    codes = block.slices * block.outputs * TILE * form.bits // 8
    room, n = (96 if small else 112) << 10, block.stages
    while n > 2 and (n - 1) * (rows + codes) + rows * (block.slices == 1) > room:
        n -= 1
    return n


def multiply(x: Tensor, weight: Coded, bias: Tensor | None, block: CodedBlock | None = None) -> Tensor:
    """x [T, in], T up to `MOST_ROWS`, of a form that is `known` -> [T, out]."""
    outputs = weight.form.outputs
    block = block_for(len(x), outputs) if block is None else block
    y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    n = shares_for(block, weight.form)
    if n == 1:
        launch(block, x, weight, bias, y)
        return y
    parts = torch.empty((n, *y.shape), dtype=torch.float32, device=x.device)
    launch(block, x, weight, None, parts[0], shares=n)
    size = 1024 if outputs % 1024 == 0 else NARROW
    _add_parts[(len(x), outputs // size)](
        parts, y if bias is None else bias, y, y.numel(), outputs, SHARES=n, BIASED=bias is not None, BLOCK=size,
        num_warps=4, **overlapped(x),
    )  # fmt: skip
    return y


def launch(
    block: CodedBlock,
    x: Tensor,
    weight: Coded,
    bias: Tensor | None,
    y: Tensor,
    squares: Tensor | None = None,
    eps: float = 0.0,
    then: tuple[Tensor, Tensor, Tensor] | None = None,
    activation: str = "none",
    *,
    gated: bool = False,
    shares: int = 1,
) -> None:
    """y = weight x + bias, with what precedes and follows it: see `linear.decode`. x: [T, in], T up to the rows of
    the block. squares: of a residual that a norm divides. then: what the next norm needs, written as in
    `ends.finish`: norm, scaled, sums; the product is added to y. shares: of the inputs, whose sums lie in as many
    results one after the other."""
    form, stored = weight.form, CodedWeight.of(weight)
    norm, scaled, sums = (y, y, y) if then is None else then
    assert len(x) <= block.rows
    assert x.stride(1) == y.stride(1) == 1
    assert x.shape[1] == form.inputs
    assert form.outputs % block.outputs == 0
    coded_product[(form.outputs // block.outputs, shares)](
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
        form.inputs // 8 if stored.of_four_bits else form.inputs,
        form.groups,
        y.shape[1],
        x.stride(0),
        y.stride(0),
        y.numel(),
        eps,
        1 if squares is None else squares.shape[1],
        NORMED=squares is not None,
        ACTIVATION=activation,
        GATED=gated,
        ADDED=then is not None,
        BIASED=bias is not None,
        ALIGNED=form.inputs % (block.slices * TILE) == 0,
        ROWS=block.rows,
        OUTPUTS=block.outputs,
        SLICES=block.slices,
        BLOCKS=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
        EARLY=block.early,
        SHARES=shares,
        ASSEMBLY=assembly(stored.kind, x.dtype) or assembly_of_bytes(stored.kind, x.dtype),
        num_warps=block.warps,
        num_stages=_stages(block, form, small=has_small_memory(x.device)),
        **stored.constants,
        **overlapped(x),
    )


@triton.jit(do_not_specialize=["n"])
def _add_parts(
    parts,
    bias,
    y,
    n,
    outputs,
    SHARES: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * outputs + output
    total = tl.load(parts + at)
    for i in tl.static_range(1, SHARES):
        total += tl.load(parts + i * n.to(tl.int64) + at)
    if BIASED:
        total += tl.load(bias + output).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty))


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
    y_share,
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
    SHARES: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    TILED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    four: tl.constexpr = KIND < 4
    words: tl.constexpr = TILE_INPUTS // 8 if four else TILE_INPUTS  # of a tile
    each: tl.constexpr = 8 if GROUP == 16 else 4 if GROUP == 32 else 2 if GROUP == 64 else 1  # groups of a tile
    part = tl.arange(0, SLICES)
    output = outputs_of(width, GATED, OUTPUTS)
    blocks_of_tiles = tl.cdiv(inputs // TILE_INPUTS, SLICES)
    from_tile = blocks_of_tiles * tl.program_id(1) // SHARES * SLICES
    to_tile = blocks_of_tiles * (tl.program_id(1) + 1) // SHARES * SLICES
    tiles = inputs // TILE_INPUTS
    own = codes + output.to(tl.int64) * row_words
    # Of 16 outputs a thread has two, and four neighbours have the same ones: a dimension for each of these.
    many: tl.constexpr = 2 if SLICES == 1 else OUTPUTS // 8
    warps: tl.constexpr = OUTPUTS // 16 if SLICES == 1 else 1
    of_threads = tl.permute(tl.reshape(output.to(tl.int64) * groups, [warps, many, 8]), (1, 0, 2))
    of_threads = tl.reshape(of_threads, [many, warps, 8, 1, 1])
    of_threads = tl.broadcast_to(of_threads, [many, warps * SLICES, 8, 4, each])
    if OVERLAPPED:
        if GROUP > 0:
            line = from_tile * each + tl.arange(0, 8) * 64  # of two bytes each
            ask_for(scales + (output.to(tl.int64) * groups)[:, None] + tl.minimum(line, groups - 1)[None, :])
        line = tl.arange(0, EARLY // 256) * 32 if four else tl.arange(0, EARLY // 128) * 128
        line = tl.minimum(from_tile * words + line, row_words - 1)
        wait_after_asking_for(own[:, None] + line[None, :])
    parts = squares_of(squares, n, blocks, NORMED, ROWS, BLOCKS)
    total = tl.zeros([OUTPUTS, ROWS] if SLICES == 1 else [SLICES, OUTPUTS, ROWS], tl.float32)
    at = own[None, :, None] + (part * words)[:, None, None] + tl.arange(0, words)[None, None, :]
    scale, zero = of_threads, of_threads
    if GROUP > 0:
        scale = _load_groups(scales, of_threads, from_tile, part, tiles, GROUP, each, SLICES)
    if ZEROS:
        zero = _load_groups(zeros, of_threads, from_tile, part, tiles, GROUP, each, SLICES)
    for first in range(from_tile, to_tile, SLICES):
        next_scale, next_zero = scale, zero
        if GROUP > 0:
            next_scale = _load_groups(scales, of_threads, first + SLICES, part, tiles, GROUP, each, SLICES)
            if ZEROS:
                next_zero = _load_groups(zeros, of_threads, first + SLICES, part, tiles, GROUP, each, SLICES)
        known = first + part < tiles
        if ALIGNED:
            found = tl.load(at + first * words)
        else:
            found = tl.load(at + first * words, mask=known[:, None, None], other=0)
        begin = x + first * TILE_INPUTS
        if four:
            total = _add_four_bits(
                total, begin, x_row, found, scale, zero, part, known, n,
                OUTPUTS, ROWS, SLICES, ALIGNED, each, KIND, OF_SCALES, GROUP, ZEROS, ASSEMBLY,
            )  # fmt: skip
        else:
            right = _load_rows(begin, x_row, part, known, n, 0, TILE_INPUTS, ROWS, SLICES, ALIGNED)
            left = of_bytes(found, right.dtype, KIND, ASSEMBLY)
            if SLICES == 1:
                left = tl.reshape(left, [OUTPUTS, TILE_INPUTS])
            if GROUP > 0:
                total += _times(tl.dot(left, right), scale, 0, each, OF_SCALES, ROWS)
            else:
                total = tl.dot(left, right, total)
        scale, zero = next_scale, next_zero
    sum_ = total if SLICES == 1 else tl.sum(total, 0)
    if GROUP == 0:
        sum_ *= float_of(tl.load(scales + output), OF_SCALES)[:, None]
    sum_ *= factor_of(multiplier, output, MULTIPLIED)[:, None]
    if NORMED:
        sum_ = normed(sum_, parts, inputs, eps)
    sum_ = activated(sum_, bias, output, BIASED, ACTIVATION, GATED, OUTPUTS, ROWS)
    y += tl.program_id(1).to(tl.int64) * y_share
    finish(sum_, y, norm, scaled, sums, n, width, y_row, ADDED, GATED, OUTPUTS, ROWS)


@triton.jit
def _load_groups(
    numbers, of_threads, first, part, tiles, GROUP: tl.constexpr, each: tl.constexpr, SLICES: tl.constexpr
):
    """The scales or the zeros of one tile of each slice, of the shape of `of_threads`, which ends with the groups
    of a tile."""
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
def _times(part, of_groups, HALF: tl.constexpr, each: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """part: [..., outputs, rows], times what its outputs' groups have."""
    many: tl.constexpr = of_groups.shape[0]
    slices: tl.constexpr = of_groups.shape[1]
    number = tl.permute(float_of(_column(of_groups, HALF, each), BITS), (1, 0, 2, 3))
    number = tl.reshape(number, [slices, many, 8, 1, 4, 1])
    in_threads = tl.reshape(part, [slices, many, 8, ROWS // 8, 4, 2])
    return tl.reshape(in_threads * number, part.shape)


@triton.jit
def _load_rows(
    x,
    x_row,
    part,
    known,
    n,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The inputs FIRST to FIRST + K of one tile of each slice, [slices, K, rows], or [K, rows] of one slice."""
    row = tl.arange(0, ROWS)
    if SLICES == 1:
        k = FIRST + tl.arange(0, K)
        found = tl.load(x + row[None, :] * x_row + k[:, None], mask=(row < n)[None, :], other=0.0)
    else:
        k = part[:, None, None] * TILE_INPUTS + FIRST + tl.arange(0, K)[None, :, None]
        there = (row < n)[None, None, :]
        if not ALIGNED:
            there = there & known[:, None, None]
        found = tl.load(x + row[None, None, :] * x_row + k, mask=there, other=0.0)
    return found


@triton.jit
def _add_four_bits(
    total,
    x,
    x_row,
    words,
    scale,
    zero,
    slices,
    known,
    n,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    ALIGNED: tl.constexpr,
    each: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """total and the products of a tile of each slice. words: [slices, outputs, 16]."""
    even, odd = tl.split(tl.reshape(words, [SLICES, OUTPUTS, 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    runs = (a, b, c, d)
    part, sums = total, total
    for i in tl.static_range(4):
        first, second = _sixteens(runs[i], x.dtype.element_ty, KIND, ASSEMBLY, SLICES, OUTPUTS)
        if GROUP == 16:
            right = _load_rows(x, x_row, slices, known, n, 32 * i, 16, ROWS, SLICES, ALIGNED)
            total, part, sums = _add_part(
                total, part, sums, first, right, scale, zero,
                2 * i, 16, each, OF_SCALES, GROUP, ZEROS, OUTPUTS, ROWS, SLICES,
            )  # fmt: skip
            right = _load_rows(x, x_row, slices, known, n, 32 * i + 16, 16, ROWS, SLICES, ALIGNED)
            total, part, sums = _add_part(
                total, part, sums, second, right, scale, zero,
                2 * i + 1, 16, each, OF_SCALES, GROUP, ZEROS, OUTPUTS, ROWS, SLICES,
            )  # fmt: skip
        else:
            both = tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), [SLICES, OUTPUTS, 32])
            right = _load_rows(x, x_row, slices, known, n, 32 * i, 32, ROWS, SLICES, ALIGNED)
            total, part, sums = _add_part(
                total, part, sums, both, right, scale, zero,
                i, 32, each, OF_SCALES, GROUP, ZEROS, OUTPUTS, ROWS, SLICES,
            )  # fmt: skip
    return total


@triton.jit
def _add_part(
    total,
    part,
    sums,
    left,
    right,
    scale,
    zero,
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
    if SLICES == 1:
        left = tl.reshape(left, [OUTPUTS, K])
    if GROUP == 0 and not ZEROS:
        total = tl.dot(left, right, total)
    else:
        ones = tl.full(left.shape, 1, left.dtype)
        if AT % of_group == 0:
            part = tl.dot(left, right)
            sums = tl.dot(ones, right) if ZEROS else part
        else:
            part = tl.dot(left, right, part)
            sums = tl.dot(ones, right, sums) if ZEROS else part
        if AT % of_group == of_group - 1:
            if ZEROS:
                part -= _times(sums, zero, half, each, 0, ROWS)
            if GROUP > 0:
                part = _times(part, scale, half, each, OF_SCALES, ROWS)
            total += part
    return total, part, sums


@triton.jit
def _sixteens(
    words,
    dtype: tl.constexpr,
    KIND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    SLICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Words of runs, [slices, outputs, 4] -> the numbers of the first and the last 16 inputs of each."""
    a, b, c, d, e, f, g, h = eight_numbers(words, dtype, KIND, ASSEMBLY)
    return _sixteen(a, b, c, d, SLICES, OUTPUTS), _sixteen(e, f, g, h, SLICES, OUTPUTS)


@triton.jit
def _sixteen(a, b, c, d, SLICES: tl.constexpr, OUTPUTS: tl.constexpr):
    """The numbers of pairs of inputs, [slices, outputs, 4] each -> [slices, outputs, 16]."""
    first, second = (
        tl.reshape(tl.join(a, b), [SLICES, OUTPUTS, 8]),
        tl.reshape(tl.join(c, d), [SLICES, OUTPUTS, 8]),
    )
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), [SLICES, OUTPUTS, 16])
