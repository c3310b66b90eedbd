"""Products of rows with weights as they are stored: codes of four and eight bits, and the layers of experts, of
which each row takes one.

Rows that take the same layer lie one after the other. The bounds between them are on the device: a launch depends
on no number that the host would have to wait for, so it can be captured. Each program computes some outputs of one
layer for all of its rows, `ROWS` at a time; a program whose layer has no rows ends at once.

A code is widened where it is needed, between memory and the tensor cores:

- Codes of four bits, which lie `in_runs`, are multiplied as they are, exactly. Of 32 inputs, or of 16,
  (sum of code * input - zero * sum of inputs) * scale is added, in float32.
- So are codes of eight bits in groups at least as wide as a block of inputs, without zeros.
- Others: (code - zero) * scale is computed in float32 and rounded to the type of the rows.

Up to `MOST_ROWS` rows a row's sums are in float32, in an order that depends on no other row.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.weights.quantized import Coded
from petiole.gpu_worker.runtime.cuda.fused.linear import coded
from petiole.gpu_worker.runtime.cuda.fused.linear.codes import (
    CodedWeight,
    assembly,
    factor_of,
    float_of,
    halves_of_runs,
    in_four,
    in_order,
    load_codes,
    load_groups,
    load_rows,
    number_of,
    operands,
    scaled,
)
from petiole.gpu_worker.runtime.cuda.fused.routing import Pairs
from petiole.gpu_worker.runtime.cuda.supported import tried

MOST_ROWS = 64
"""A linear layer with more rows widens its weights once, for a product of torch: each block of rows would widen
them again."""


class GroupedBlock(NamedTuple):
    """What a program computes at a time: outputs by inputs by rows, in this many stages."""

    outputs: int
    inputs: int
    rows: int
    stages: int
    warps: int


FEW, MANY, LARGE = (
    GroupedBlock(64, 128, 16, 4, 4),
    GroupedBlock(64, 128, 64, 3, 4),
    GroupedBlock(128, 64, 128, 4, 8),
)
"""For at most 16 rows a layer, for more, and for more than 64 of weights that are not coded: the quickest of those
that were tried on an H100. A large block with codes would not fit into smaller cards."""

PROGRAMS = 384
"""A linear layer with fewer programs than this shares out its inputs, too, so that all of a card reads its
weights. The sums of the shares are added in order."""

MOST_SHARES = 8

FAR = 2**31
"""From so many outputs on, their places take 64 bits."""

AT_ONCE = 2**25
"""Weights that are widened at a time."""


def multiply(x: Tensor, weight: Coded, bias: Tensor | None) -> Tensor:
    """[T, in] -> [T, out], x's type. weight: of a form that `known.has_kernel`."""
    assert x.dim() == 2
    y = torch.empty((len(x), weight.form.outputs), dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    if len(x) <= coded.MOST_ROWS and tried("codes") and coded.known(weight.form):
        return coded.multiply(x, weight, bias)
    if len(x) <= MOST_ROWS:
        _launch(x, weight, bias, y, None, 1)
        return y
    step = max(1, AT_ONCE // weight.form.inputs)
    for start in range(0, weight.form.outputs, step):
        end = min(start + step, weight.form.outputs)
        torch.mm(x, widened(weight.rows(start, end), x.dtype).t(), out=y[:, start:end])
    return y if bias is None else y.add_(bias)


def widened(weight: Coded, dtype: torch.dtype) -> Tensor:
    """[out, in]."""
    form, stored = weight.form, CodedWeight.of(weight)
    wide = torch.empty((form.outputs, form.inputs), dtype=dtype, device=weight.codes.device)
    width = stored.width(form.inputs, 128)
    _widen[(triton.cdiv(form.outputs, 32), triton.cdiv(form.inputs, width))](
        stored.codes,
        stored.scales,
        stored.zeros,
        stored.multiplier,
        wide,
        form.outputs,
        form.inputs,
        form.groups,
        OUTPUTS=32,
        INPUTS=width,
        num_warps=4,
        **stored.constants,
    )
    return wide


def gather_product(x: Tensor, pairs: Pairs, weight: Tensor | Coded, bias: Tensor | None) -> Tensor:
    """x: [positions, in] -> [pairs, out], sorted by layer; those of no layer are anything. weight, bias: of all
    layers, one after the other."""
    return _grouped(x, pairs, weight, bias, gathered=True)


def scatter_product(x: Tensor, pairs: Pairs, weight: Tensor | Coded, bias: Tensor | None) -> Tensor:
    """x: [pairs, in], sorted by layer -> [pairs, out], unsorted. Those of no layer are anything."""
    return _grouped(x, pairs, weight, bias, gathered=False)


def _grouped(x: Tensor, pairs: Pairs, weight: Tensor | Coded, bias: Tensor | None, *, gathered: bool) -> Tensor:
    outputs = weight.form.outputs if isinstance(weight, Coded) else len(weight)
    y = torch.empty((len(pairs.order), outputs // pairs.layers), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, pairs, pairs.chosen if gathered else 0)
    return y


def combined(y: Tensor, pairs: Pairs, shares: Tensor) -> Tensor:
    """y: [pairs, hidden], unsorted; shares: float32 [positions, chosen] -> sums, [positions, hidden], in the order
    in which a position names its layers, in float32. No layer counts as zeros."""
    n, chosen = shares.shape
    sums = torch.empty((n, y.shape[1]), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(y.shape[1]))
    grid = (n, triton.cdiv(y.shape[1], block))
    taken, shares = pairs.taken.contiguous(), shares.contiguous()
    _combine[grid](y, taken, shares, sums, y.shape[1], pairs.layers, CHOSEN=chosen, BLOCK=block, num_warps=4)
    return sums


@triton.jit
def _combine(y, taken, shares, sums, width, layers, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        pair = row * CHOSEN + i
        there = column < tl.where(tl.load(taken + pair) < layers, width, 0)
        total += tl.load(y + pair * width + column, mask=there, other=0.0).to(tl.float32) * tl.load(shares + pair)
    tl.store(sums + row * width + column, total.to(sums.dtype.element_ty), mask=used)


def _launch(
    x: Tensor, weight: Tensor | Coded, bias: Tensor | None, y: Tensor, pairs: Pairs | None, chosen: int
) -> None:
    """chosen: layers that a row of x takes, whose outputs are sorted; 0: rows of x are sorted, and outputs not."""
    layers, inputs = 1 if pairs is None else pairs.layers, x.shape[1]
    stored = CodedWeight.of(weight)
    block = FEW if len(y) <= FEW.rows * layers else MANY
    if len(y) > MANY.rows * layers and not isinstance(weight, Coded):
        block = LARGE
    assert x.stride(1) == 1
    assert y.is_contiguous()
    assert stored.codes.is_contiguous()
    width = stored.width(inputs, block.inputs)
    at_once, across = triton.cdiv(len(y), block.rows * layers), triton.cdiv(y.shape[1], block.outputs)
    shares = 1
    if pairs is None:
        shares = max(1, min(MOST_SHARES, PROGRAMS // (across * at_once), inputs // width // 4))
    parts = torch.empty((shares, *y.shape), dtype=torch.float32, device=y.device) if shares > 1 else y
    _grouped_product[(across, layers, at_once * shares)](
        x,
        stored.codes,
        stored.scales,
        stored.zeros,
        stored.multiplier,
        stored.codes if bias is None else bias,
        parts,
        stored.codes if pairs is None else pairs.order,
        stored.codes if pairs is None else pairs.bounds,
        len(y),
        x.stride(0),
        y.shape[1],
        inputs,
        stored.groups,
        CHOSEN=chosen,
        SORTED=pairs is not None,
        SHARES=shares,
        WIDE=parts.numel() >= FAR,
        EXACT=stored.exact(width),
        ASSEMBLY=assembly(stored.kind, x.dtype),
        BIASED=bias is not None,
        ALIGNED=inputs % width == 0,
        OUTPUTS=block.outputs,
        INPUTS=width,
        ROWS=block.rows,
        num_warps=block.warps,
        num_stages=block.stages,
        **stored.constants,
    )
    if shares > 1:
        _add_shares[(triton.cdiv(y.numel(), 1024),)](parts, y, y.numel(), SHARES=shares, BLOCK=1024, num_warps=4)


@triton.jit(do_not_specialize=["n"])
def _add_shares(parts, y, n, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SHARES):
        total += tl.load(parts + i * n + at, mask=at < n, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["n_rows"])
def _grouped_product(
    x,
    codes,
    scales,
    zeros,
    multiplier,
    bias,
    y,
    order,
    bounds,
    n_rows,
    x_row,
    outputs,
    inputs,
    groups,
    CHOSEN: tl.constexpr,
    SORTED: tl.constexpr,
    SHARES: tl.constexpr,
    WIDE: tl.constexpr,
    BIASED: tl.constexpr,
    ALIGNED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    EXACT: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    TILED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    layer, lane = tl.program_id(1), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first, end = 0, n_rows
    if SORTED:
        first, end = tl.load(bounds + layer), tl.load(bounds + layer + 1)
    there = lane < outputs
    lane = tl.minimum(lane, outputs - 1)
    output = layer.to(tl.int64) * outputs + lane
    share, group_of_rows = tl.program_id(2) % SHARES, tl.program_id(2) // SHARES
    blocks = tl.cdiv(inputs, INPUTS)
    from_input, to_input = blocks * share // SHARES * INPUTS, blocks * (share + 1) // SHARES * INPUTS
    first += group_of_rows * ROWS
    step, steps = ROWS * (tl.num_programs(2) // SHARES), 1
    if SORTED:
        steps = tl.cdiv(tl.maximum(end - first, 0), step)
    for i in range(steps):
        row = first + i * step + tl.arange(0, ROWS)
        used = row < end
        row = tl.minimum(row, end - 1)
        source = row
        if CHOSEN > 0 and SORTED:
            source = tl.load(order + row) // CHOSEN
        rows = x + source.to(tl.int64) * x_row
        factor = factor_of(multiplier, output, MULTIPLIED)
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        if KIND > 0 and KIND < 4:  # those of the next block are read while this one is multiplied
            block_scales = load_groups(scales, output, from_input, groups, GROUP, INPUTS)
            block_zeros = load_groups(zeros, output, from_input, groups, GROUP, INPUTS) if ZEROS else block_scales
        for begin in range(from_input, to_input, INPUTS):
            if KIND > 0 and KIND < 4:
                next_scales = load_groups(scales, output, begin + INPUTS, groups, GROUP, INPUTS)
                next_zeros = next_scales
                if ZEROS:
                    next_zeros = load_groups(zeros, output, begin + INPUTS, groups, GROUP, INPUTS)
                total = _add_four_bits(
                    total, rows, codes, block_scales, block_zeros, output, begin, used, inputs,
                    ALIGNED, OUTPUTS, INPUTS, KIND, OF_SCALES, GROUP, ZEROS, TILED, ASSEMBLY,
                )  # fmt: skip
                block_scales, block_zeros = next_scales, next_zeros
            else:
                k = begin + tl.arange(0, INPUTS)
                known = k < inputs
                left = number_of(codes, output, k, known, inputs, KIND, ALIGNED)
                if KIND > 0 and not EXACT:
                    left = scaled(
                        left, scales, zeros, factor, output, begin, groups, OF_SCALES, GROUP, ZEROS, INPUTS
                    )
                right = load_rows(rows, k, used, known, ALIGNED)
                if EXACT and GROUP > 0:
                    scale = float_of(tl.load(scales + output * groups + begin // GROUP), OF_SCALES)
                    total += tl.dot(left.to(right.dtype), right) * scale[:, None]
                else:
                    total += tl.dot(left.to(right.dtype), right)
        if EXACT and GROUP == 0:
            total *= float_of(tl.load(scales + output), OF_SCALES)[:, None]
        if EXACT:
            total *= factor[:, None]
        if BIASED:
            total += tl.where(share == 0, tl.load(bias + output).to(tl.float32), 0.0)[:, None]
        target = row
        if CHOSEN == 0 and SORTED:
            target = tl.load(order + row)
        target = share * n_rows + target.to(tl.int64 if WIDE else tl.int32)
        at = target[None, :] * outputs + lane[:, None]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=used[None, :] & there[:, None])


@triton.jit
def _add_four_bits(
    total,
    rows,
    codes,
    scales,
    zeros,
    output,
    begin,
    used,
    inputs,
    ALIGNED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    TILED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """total and the products of a block of inputs, whose groups have these scales and zeros. Codes are
    multiplied as they are; the sums of 32 inputs, or of 16, are scaled."""
    word = begin // 8 + tl.arange(0, INPUTS // 8)
    row_words = inputs // 8
    if TILED:  # else the compiler copies 8 bytes at a time
        row_words = tl.multiple_of(row_words, 16)
    words = load_codes(codes, output, word, word < row_words, row_words, ALIGNED)
    runs = in_four(words, OUTPUTS, TILED)
    of_scales = halves_of_runs(scales, OUTPUTS, GROUP)
    of_zeros = halves_of_runs(zeros, OUTPUTS, GROUP)
    ones = tl.full([OUTPUTS, 16], 1, rows.dtype.element_ty)
    for i in tl.static_range(INPUTS // 32):
        k = begin + 32 * i + tl.arange(0, 16)
        first = load_rows(rows, k, used, k < inputs, ALIGNED)
        second = load_rows(rows, k + 16, used, k < inputs, ALIGNED)
        left, right = operands(runs[i], first.dtype, KIND, ASSEMBLY, OUTPUTS)
        part = tl.dot(left, first)
        sums = tl.dot(ones, first) if ZEROS else part
        if GROUP == 16:
            total += _of_group(part, sums, of_scales[2 * i], of_zeros[2 * i], OF_SCALES, GROUP, ZEROS)
            part = tl.dot(right, second)
            sums = tl.dot(ones, second) if ZEROS else part
        else:
            part = tl.dot(right, second, part)
            sums = tl.dot(ones, second, sums) if ZEROS else part
        total += _of_group(part, sums, of_scales[2 * i + 1], of_zeros[2 * i + 1], OF_SCALES, GROUP, ZEROS)
    return total


@triton.jit
def _of_group(part, sums, scale, zero, OF_SCALES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """(part - zero * sums) * scale. part: sums of codes times inputs; sums: of the inputs."""
    if ZEROS:
        part -= zero.to(tl.float32)[:, None] * sums
    if GROUP > 0:
        part *= float_of(scale, OF_SCALES)[:, None]
    return part


@triton.jit
def _widen(
    codes,
    scales,
    zeros,
    multiplier,
    wide,
    outputs,
    inputs,
    groups,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    TILED: tl.constexpr,
):
    lane, begin = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * INPUTS
    there, output = lane < outputs, tl.minimum(lane, outputs - 1).to(tl.int64)
    k = begin + tl.arange(0, INPUTS)
    if KIND < 4:
        word = begin // 8 + tl.arange(0, INPUTS // 8)
        words = load_codes(codes, output, word, word < inputs // 8, inputs // 8, False)
        number = in_order(words, KIND, OUTPUTS, INPUTS, TILED)
    else:
        number = number_of(codes, output, k, k < inputs, inputs, KIND, False)
    factor = factor_of(multiplier, output, MULTIPLIED)
    number = scaled(number, scales, zeros, factor, output, begin, groups, OF_SCALES, GROUP, ZEROS, INPUTS)
    at, used = wide + output[:, None] * inputs + k[None, :], there[:, None] & (k < inputs)[None, :]
    tl.store(at, number.to(wide.dtype.element_ty), mask=used)
