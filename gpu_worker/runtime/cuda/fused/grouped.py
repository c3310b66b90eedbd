"""Products of rows with weights as they are stored: codes of four and eight bits, and the layers of experts, of
which each row takes one.

Rows that take the same layer lie one after the other. The bounds between them are on the device: a launch depends
on no number that the host would have to wait for, so it can be captured. Each program computes some outputs of one
layer for all of its rows, `ROWS` at a time; a program whose layer has no rows ends at once.

A code is widened where it is needed, between memory and the tensor cores:

- Groups at least as wide as a block of inputs, without zeros: codes meet the rows as they are, exactly, and each
  block's sum is scaled, in float32.
- Others: (code - zero) * scale is computed in float32 and rounded to the type of the rows.

Up to `MOST_ROWS` rows a row's sums are in float32, in an order that depends on no other row.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.weights.coded import E2M1, SIGNED, UNSIGNED, Coded

MOST_ROWS = 64
"""A linear layer with more rows widens its weights once, for a product of torch: each block of rows would widen
them again."""


class Block(NamedTuple):
    """What a program computes at a time: outputs by inputs by rows, in this many stages."""

    outputs: int
    inputs: int
    rows: int
    stages: int
    warps: int


FEW, MANY = Block(64, 128, 16, 5, 4), Block(64, 128, 64, 3, 4)
"""For at most 16 rows a layer, and for more: the quickest of those that were tried on an H100."""

PROGRAMS = 384
"""A linear layer with fewer programs than this shares out its inputs, too, so that all of a card reads its
weights. The sums of the shares are added in order."""

MOST_SHARES = 8

AT_ONCE = 2**25
"""Weights that are widened at a time."""

_TABLES = {SIGNED: 1, UNSIGNED: 2, E2M1: 3}
_PLAIN, _INTEGERS, _E4M3 = 0, 4, 5
"""How a code becomes a number; eight-bit floats are read as bits, because older cards have no such type."""

_BITS = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2}
"""The same for scales."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a position and one of its layers, sorted by layer.

    order: int64 [pairs], where each of them lies unsorted; those that take no layer come last. bounds: int32
    [layers + 1], where the pairs of each layer begin. chosen: layers that a position takes."""

    order: Tensor
    bounds: Tensor
    chosen: int

    @property
    def layers(self) -> int:
        return len(self.bounds) - 1


def sort_pairs(taken: Tensor, layers: int) -> Pairs:
    """taken: int64 [positions, chosen], `layers` for none."""
    flat = taken.flatten()
    found, order = flat.sort(stable=True)
    every = torch.arange(layers + 1, device=flat.device)
    return Pairs(order, torch.searchsorted(found, every, out_int32=True), taken.shape[1])


def multiply(x: Tensor, weight: Coded, bias: Tensor | None) -> Tensor:
    """[T, in] -> [T, out], x's type. weight: of a form that `known.has_kernel`."""
    assert x.dim() == 2
    y = torch.empty((len(x), weight.form.outputs), dtype=x.dtype, device=x.device)
    if not len(x):
        return y
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
    form, stored = weight.form, _Stored.of(weight)
    wide = torch.empty((form.outputs, form.inputs), dtype=dtype, device=weight.codes.device)
    width = min(128, triton.next_power_of_2(max(form.inputs, 32)))
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
        **stored.constants(width),
    )
    return wide


def gather_product(x: Tensor, pairs: Pairs, weight: Tensor | Coded, bias: Tensor | None) -> Tensor:
    """x: [positions, in] -> [pairs, out], sorted by layer. weight, bias: of all layers, one after the other."""
    return _grouped(x, pairs, weight, bias, gathered=True)


def scatter_product(x: Tensor, pairs: Pairs, weight: Tensor | Coded, bias: Tensor | None) -> Tensor:
    """x: [pairs, in], sorted by layer -> [pairs, out], unsorted. What takes no layer gets zeros."""
    return _grouped(x, pairs, weight, bias, gathered=False)


def _grouped(x: Tensor, pairs: Pairs, weight: Tensor | Coded, bias: Tensor | None, *, gathered: bool) -> Tensor:
    outputs = weight.form.outputs if isinstance(weight, Coded) else len(weight)
    y = torch.zeros((len(pairs.order), outputs // pairs.layers), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, pairs, pairs.chosen if gathered else 0)
    return y


def combined(y: Tensor, shares: Tensor) -> Tensor:
    """y: [positions * chosen, hidden]; shares: float32 [positions, chosen] -> sums, [positions, hidden], in the
    order in which a position names its layers, in float32."""
    n, chosen = shares.shape
    sums = torch.empty((n, y.shape[1]), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(y.shape[1]))
    grid = (n, triton.cdiv(y.shape[1], block))
    _combine[grid](y, shares.contiguous(), sums, y.shape[1], CHOSEN=chosen, BLOCK=block, num_warps=4)
    return sums


@triton.jit
def _combine(y, shares, sums, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        share = tl.load(shares + row * CHOSEN + i)
        total += tl.load(y + (row * CHOSEN + i) * width + column, mask=used, other=0.0).to(tl.float32) * share
    tl.store(sums + row * width + column, total.to(sums.dtype.element_ty), mask=used)


def _launch(
    x: Tensor, weight: Tensor | Coded, bias: Tensor | None, y: Tensor, pairs: Pairs | None, chosen: int
) -> None:
    """chosen: layers that a row of x takes, whose outputs are sorted; 0: rows of x are sorted, and outputs not."""
    layers, inputs = 1 if pairs is None else pairs.layers, x.shape[1]
    block = FEW if len(y) <= FEW.rows * layers else MANY
    stored = _Stored.of(weight)
    assert x.stride(1) == 1
    assert y.is_contiguous()
    assert stored.codes.is_contiguous()
    width = min(block.inputs, triton.next_power_of_2(max(inputs, 32)))
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
        EXACT=stored.exact(width),
        BIASED=bias is not None,
        ALIGNED=inputs % width == 0,
        TOGETHER=x.dtype.itemsize == 2 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0,
        OUTPUTS=block.outputs,
        INPUTS=width,
        ROWS=block.rows,
        num_warps=block.warps,
        num_stages=block.stages,
        **stored.constants(width),
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


class _Stored(NamedTuple):
    """A weight as the kernels read it. kind: how a code becomes a number; of_scales: how a scale does. groups,
    group: of an output. Tensors that a weight has not are its codes, and are not read."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    multiplier: Tensor
    kind: int = _PLAIN
    of_scales: int = 0
    groups: int = 1
    group: int = 0
    has_zeros: bool = False
    multiplied: bool = False

    @staticmethod
    def of(weight: Tensor | Coded) -> _Stored:
        if not isinstance(weight, Coded):
            return _Stored(weight, weight, weight, weight)
        form, scales = weight.form, weight.scales
        floats = form.codes == torch.float8_e4m3fn
        kind = _TABLES[form.table] if form.table else _E4M3 if floats else _INTEGERS
        codes = weight.codes.view(torch.uint8) if floats else weight.codes
        of_scales = _BITS.get(scales.dtype, 0)
        return _Stored(
            codes,
            scales.view(torch.uint8) if of_scales else scales,
            codes if weight.zeros is None else weight.zeros,
            codes if weight.multiplier is None else weight.multiplier,
            kind,
            of_scales,
            form.groups,
            form.group,
            weight.zeros is not None,
            weight.multiplier is not None,
        )

    def exact(self, width: int) -> bool:
        """Whether codes meet the rows unscaled, in blocks of so many inputs."""
        return self.kind != _PLAIN and not self.has_zeros and (self.groups == 1 or self.group >= width)

    def constants(self, width: int) -> dict[str, int]:
        """What a kernel over blocks of so many inputs is compiled for. RUNS: groups of a block. A_GROUP: blocks of
        a group; 0: all of them."""
        return {
            "KIND": self.kind,
            "OF_SCALES": self.of_scales,
            "RUNS": 1 if self.groups == 1 else max(1, width // self.group),
            "A_GROUP": 0 if self.groups == 1 else max(1, self.group // width),
            "ZEROS": self.has_zeros,
            "MULTIPLIED": self.multiplied,
        }


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
    EXACT: tl.constexpr,
    BIASED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOGETHER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    RUNS: tl.constexpr,
    A_GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    halved: tl.constexpr = (KIND > 0) & (KIND < 4)
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
    for start in range(first + group_of_rows * ROWS, end, ROWS * (tl.num_programs(2) // SHARES)):
        row = start + tl.arange(0, ROWS)
        used = row < end
        row = tl.minimum(row, end - 1)
        source, target = row, row
        if SORTED:
            pair = tl.load(order + row)
            if CHOSEN == 0:
                target = pair
            else:
                source = pair // CHOSEN
        rows = x + source.to(tl.int64) * x_row
        factor = _factor(multiplier, output, MULTIPLIED)
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for begin in range(from_input, to_input, INPUTS):
            if halved:
                byte = begin // 2 + tl.arange(0, INPUTS // 2)
                known = byte < inputs // 2
                low, high = _pair(codes, output, byte, known, inputs // 2, KIND, ALIGNED)
                if not EXACT:
                    low, high = _scaled(
                        low,
                        high,
                        scales,
                        zeros,
                        factor,
                        output,
                        begin,
                        groups,
                        OF_SCALES,
                        RUNS,
                        A_GROUP,
                        ZEROS,
                        INPUTS,
                    )
                if TOGETHER:  # half as many loads, and they are wider
                    both = _rows(rows.to(tl.pointer_type(tl.int32)), byte, used, known, ALIGNED)
                    even = (both & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
                    odd = (both >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
                else:
                    even = _rows(rows, 2 * byte, used, known, ALIGNED)
                    odd = _rows(rows, 2 * byte + 1, used, known, ALIGNED)
                part = tl.dot(low.to(even.dtype), even)
                part = tl.dot(high.to(odd.dtype), odd, part)
            else:
                k = begin + tl.arange(0, INPUTS)
                known = k < inputs
                left = _one(codes, output, k, known, inputs, KIND, ALIGNED)
                if KIND > 0 and not EXACT:
                    left, _ = _scaled(
                        left,
                        left,
                        scales,
                        zeros,
                        factor,
                        output,
                        begin,
                        groups,
                        OF_SCALES,
                        RUNS,
                        A_GROUP,
                        ZEROS,
                        INPUTS,
                    )
                right = _rows(rows, k, used, known, ALIGNED)
                part = tl.dot(left.to(right.dtype), right)
            if EXACT and A_GROUP > 0:
                part *= _wide(tl.load(scales + output * groups + begin // (INPUTS * A_GROUP)), OF_SCALES)[:, None]
            total += part
        if EXACT and A_GROUP == 0:
            total *= _wide(tl.load(scales + output), OF_SCALES)[:, None]
        if EXACT:
            total *= factor[:, None]
        if BIASED:
            total += tl.where(share == 0, tl.load(bias + output).to(tl.float32), 0.0)[:, None]
        at = y + share * n_rows * outputs + target.to(tl.int64)[None, :] * outputs + lane[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=used[None, :] & there[:, None])


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
    RUNS: tl.constexpr,
    A_GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    lane, begin = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * INPUTS
    there, output = lane < outputs, tl.minimum(lane, outputs - 1).to(tl.int64)
    factor = _factor(multiplier, output, MULTIPLIED)
    if KIND < 4:
        byte = begin // 2 + tl.arange(0, INPUTS // 2)
        known = byte < inputs // 2
        low, high = _pair(codes, output, byte, known, inputs // 2, KIND, False)
        low, high = _scaled(
            low, high, scales, zeros, factor, output, begin, groups, OF_SCALES, RUNS, A_GROUP, ZEROS, INPUTS
        )
        low, high = low.to(wide.dtype.element_ty), high.to(wide.dtype.element_ty)
        used = there[:, None] & known[None, :]
        if wide.dtype.element_ty.primitive_bitwidth == 16:  # in half as many stores, and they are wider
            first = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            both = high.to(tl.int16, bitcast=True).to(tl.int32) << 16 | first
            at = output[:, None] * (inputs // 2) + byte[None, :]
            tl.store(wide.to(tl.pointer_type(tl.int32)) + at, both, mask=used)
        else:
            at = output[:, None] * inputs + 2 * byte[None, :]
            tl.store(wide + at, low, mask=used)
            tl.store(wide + at + 1, high, mask=used)
    else:
        k = begin + tl.arange(0, INPUTS)
        number = _one(codes, output, k, k < inputs, inputs, KIND, False)
        number, _ = _scaled(
            number, number, scales, zeros, factor, output, begin, groups, OF_SCALES, RUNS, A_GROUP, ZEROS, INPUTS
        )
        at, used = wide + output[:, None] * inputs + k[None, :], there[:, None] & (k < inputs)[None, :]
        tl.store(at, number.to(wide.dtype.element_ty), mask=used)


@triton.jit
def _factor(multiplier, output, MULTIPLIED: tl.constexpr):
    """Of each output, float32."""
    return tl.load(multiplier + output) if MULTIPLIED else tl.full(output.shape, 1.0, tl.float32)


@triton.jit
def _load(codes, output, k, known, width, ALIGNED: tl.constexpr):
    at = codes + output[:, None] * width + k[None, :]
    if ALIGNED:
        return tl.load(at)
    return tl.load(at, mask=known[None, :], other=0)


@triton.jit
def _pair(codes, output, byte, known, width, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The numbers of even and of odd inputs, float32."""
    packed = _load(codes, output, byte, known, width, ALIGNED).to(tl.int32)
    return _number(packed & 15, KIND), _number(packed >> 4, KIND)


@triton.jit
def _one(codes, output, k, known, width, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers, float32; a weight that is not coded is as it is."""
    found = _load(codes, output, k, known, width, ALIGNED)
    return found if KIND == 0 else _wide(found, 2 if KIND == 5 else 0)


@triton.jit
def _rows(rows, k, used, known, ALIGNED: tl.constexpr):
    """[inputs, rows]; zeros in place of what is not there."""
    there = used[None, :]
    if not ALIGNED:
        there = there & known[:, None]
    return tl.load(rows[None, :] + k[:, None], mask=there, other=0)


@triton.jit
def _number(code, KIND: tl.constexpr):
    """What a code of four bits stands for, float32."""
    if KIND == 3:  # twice a value of E2M1, from a table of eight
        doubled = tl.full(code.shape, 0xC8643210, tl.uint32) >> ((code & 7) * 4).to(tl.uint32)
        magnitude = _whole((doubled & 15).to(tl.int32), 0.0) * 0.5
        return tl.where(code > 7, -magnitude, magnitude)
    return _whole(code, 8.0 if KIND == 1 else 0.0)


@triton.jit
def _whole(number, LESS: tl.constexpr):
    """A small integer as float32, by the bits of 2**23: quicker than a conversion. LESS: what is taken from it."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def _wide(number, BITS: tl.constexpr):
    """float32. BITS: 1: the exponent of a power of two (E8M0); 2: four bits of exponent and three of mantissa."""
    if BITS == 1:
        return (number.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if BITS == 2:
        bits = number.to(tl.int32)
        magnitude = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        return tl.where(bits > 127, -magnitude, magnitude)
    return number.to(tl.float32)


@triton.jit
def _scaled(
    low,
    high,
    scales,
    zeros,
    factor,
    output,
    begin,
    groups,
    OF_SCALES: tl.constexpr,
    RUNS: tl.constexpr,
    A_GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """(number - zero) * scale * factor, of both. low, high: float32, of a block's inputs, or of every second one.
    factor: of an output; a scale without it may be beyond float16."""
    scale = _of_groups(scales, factor, low, output, begin, groups, OF_SCALES, RUNS, A_GROUP, INPUTS)
    if ZEROS:
        zero = _of_groups(
            zeros, tl.full(output.shape, 1.0, tl.float32), low, output, begin, groups, 0, RUNS, A_GROUP, INPUTS
        )
        low, high = low - zero, high - zero
    return low * scale, high * scale


@triton.jit
def _of_groups(
    numbers,
    factor,
    like,
    output,
    begin,
    groups,
    BITS: tl.constexpr,
    RUNS: tl.constexpr,
    A_GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """What a block's groups have, times the factor, float32, spread over the shape of `like`."""
    at = numbers + output * groups
    if RUNS > 1:
        group = begin // INPUTS * RUNS + tl.arange(0, RUNS)
        found = _wide(tl.load(at[:, None] + group[None, :], mask=(group < groups)[None, :], other=0), BITS)
        found *= factor[:, None]
        run: tl.constexpr = like.shape[1] // RUNS
        spread = tl.reshape(tl.broadcast_to(found[:, :, None], (like.shape[0], RUNS, run)), like.shape)
    else:
        if A_GROUP > 0:
            at += begin // (INPUTS * A_GROUP)
        spread = tl.broadcast_to((_wide(tl.load(at), BITS) * factor)[:, None], like.shape)
    return spread
