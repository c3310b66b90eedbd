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

from petiole.gpu_worker.models.weights.coded import E2M1, RUN, SIGNED, UNSIGNED, Coded

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

_RUNS = 4
"""Runs of codes in a block."""

_FLOATS = {
    torch.bfloat16: ("bf16", 0x3F803F80, 0x43004300, 0x7E807E80, {1: 0xC308C308, 2: 0xC300C300}, 6),
    torch.float16: ("f16", 0x3C003C00, 0x64006400, 0x74007400, {1: 0xE408E408, 2: 0xE400E400}, 9),
}
"""What PTX calls a type, and twice each: 1; 128 or 1024, whose last bit is worth 1; the power of two that
corrects an exponent of E2M1; and what is added to an integer, by the kind of its code. Then where the
lowest of E2M1's bits goes."""

_BITS = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2}
"""The same for scales."""


def _assembly(kind: int, dtype: torch.dtype) -> str:
    """PTX that makes eight numbers of 16 bits of a word of codes, two at a time; empty: there is none, and plain
    Triton does it. The bits of an integer become the last ones of 128 or 1024, which is taken away again. Those of
    E2M1 become the same bits of the wider float, whose exponent is then corrected by a product."""
    if triton.knobs.runtime.interpret or kind not in _TABLES.values() or dtype not in _FLOATS:
        return ""
    name, one, first, exponent, less, place = _FLOATS[dtype]
    of_floats = kind == _TABLES[E2M1]
    times, plus = (exponent, 0x80008000) if of_floats else (one, less[kind])
    lines = [f"mov.b32 times, {times:#x};", f"mov.b32 plus, {plus:#x};"]
    for i in range(4):
        if of_floats:
            lines += [
                _shifted("s", 12 - 4 * i),
                "and.b32 s, s, 0x80008000;",
                _shifted("t", place - 4 * i),
                f"lop3.b32 t, t, {0x70007 << place:#x}, s, 0xea;",
            ]
        else:
            lines += [_shifted("t", -4 * i), f"lop3.b32 t, t, 0x000f000f, {first:#x}, 0xea;"]
        lines += [f"fma.rn.{name}x2 t, t, times, plus;", f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, t;"]
    return "{ .reg .b32 s, t, times, plus; " + " ".join(lines) + " }"


def _shifted(to: str, left: int) -> str:
    """A word, moved by so many bits to the left, or to the right."""
    return f"shl.b32 {to}, $8, {left};" if left > 0 else f"shr.u32 {to}, $8, {-left};"


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
    width = _width(form.inputs, stored.kind, 128)
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
    width = _width(inputs, stored.kind, block.inputs)
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
        ASSEMBLY=_assembly(stored.kind, x.dtype),
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


def _width(inputs: int, kind: int, most: int) -> int:
    """Inputs of a block."""
    return _RUNS * RUN if kind in _TABLES.values() else min(most, triton.next_power_of_2(max(inputs, 32)))


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
        assert form.in_runs or not form.table
        codes = weight.codes.view(torch.int32 if form.table else torch.uint8 if floats else torch.int8)
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
        of_bytes = self.kind != _PLAIN and not self.has_zeros and (self.groups == 1 or self.group >= width)
        return self.kind in _TABLES.values() or of_bytes

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for. GROUP: inputs of a group; 0: all of them."""
        return {
            "KIND": self.kind,
            "OF_SCALES": self.of_scales,
            "GROUP": 0 if self.groups == 1 else self.group,
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
            if KIND > 0 and KIND < 4:
                total = _add_four_bits(
                    total, rows, codes, scales, zeros, output, begin, used, inputs, groups,
                    ALIGNED, OUTPUTS, INPUTS, KIND, OF_SCALES, GROUP, ZEROS, ASSEMBLY,
                )  # fmt: skip
            else:
                k = begin + tl.arange(0, INPUTS)
                known = k < inputs
                left = _one(codes, output, k, known, inputs, KIND, ALIGNED)
                if KIND > 0 and not EXACT:
                    left = _scaled(
                        left, scales, zeros, factor, output, begin, groups, OF_SCALES, GROUP, ZEROS, INPUTS
                    )
                right = _rows(rows, k, used, known, ALIGNED)
                part = tl.dot(left.to(right.dtype), right)
                if EXACT and GROUP > 0:
                    part *= _wide(tl.load(scales + output * groups + begin // GROUP), OF_SCALES)[:, None]
                total += part
        if EXACT and GROUP == 0:
            total *= _wide(tl.load(scales + output), OF_SCALES)[:, None]
        if EXACT:
            total *= factor[:, None]
        if BIASED:
            total += tl.where(share == 0, tl.load(bias + output).to(tl.float32), 0.0)[:, None]
        at = y + share * n_rows * outputs + target.to(tl.int64)[None, :] * outputs + lane[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=used[None, :] & there[:, None])


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
    groups,
    ALIGNED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """total and the products of a block of 128 inputs. Codes meet the rows as they are; the sums of 32 inputs, or
    of 16, are scaled."""
    tl.static_assert(INPUTS == 128)
    word = begin // 8 + tl.arange(0, INPUTS // 8)
    words = _load(codes, output, word, word < inputs // 8, inputs // 8, ALIGNED)
    runs = _in_four(words, OUTPUTS)
    for i in tl.static_range(INPUTS // 32):
        k = begin + 32 * i + tl.arange(0, 16)
        first = _rows(rows, k, used, k < inputs, ALIGNED)
        second = _rows(rows, k + 16, used, k < inputs, ALIGNED)
        left, right = _matrices(runs[i], first.dtype, KIND, ASSEMBLY, OUTPUTS)
        part = tl.dot(left, first)
        ones = tl.full([OUTPUTS, 16], 1, first.dtype)
        sums = tl.dot(ones, first) if ZEROS else part
        at = begin + 32 * i
        if GROUP == 16:
            total += _of_group(part, sums, scales, zeros, output, at, groups, OF_SCALES, GROUP, ZEROS, ALIGNED)
            part = tl.dot(right, second)
            sums = tl.dot(ones, second) if ZEROS else part
            at += 16
        else:
            part = tl.dot(right, second, part)
            sums = tl.dot(ones, second, sums) if ZEROS else part
        total += _of_group(part, sums, scales, zeros, output, at, groups, OF_SCALES, GROUP, ZEROS, ALIGNED)
    return total


@triton.jit
def _of_group(
    part,
    sums,
    scales,
    zeros,
    output,
    begin,
    groups,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """(part - zero * sums) * scale, of the group that begins at an input or includes it. part: sums of codes times
    inputs; sums: of the inputs."""
    group = 0 if GROUP == 0 else begin // GROUP
    if not ALIGNED:
        group = tl.minimum(group, groups - 1)
    at = output * groups + group
    if ZEROS:
        part -= tl.load(zeros + at).to(tl.float32)[:, None] * sums
    if GROUP > 0:
        part *= _wide(tl.load(scales + at), OF_SCALES)[:, None]
    return part


@triton.jit
def _in_four(words, OUTPUTS: tl.constexpr):
    """[outputs, 16] -> four of [outputs, 4]."""
    in_pairs = tl.reshape(tl.permute(tl.reshape(words, [OUTPUTS, 4, 4]), (0, 2, 1)), [OUTPUTS, 4, 2, 2])
    even, odd = tl.split(in_pairs)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _matrices(words, dtype: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr, OUTPUTS: tl.constexpr):
    """Words of 32 inputs, [outputs, 4] -> what the codes of the first and the last 16 stand for, [outputs, 16]."""
    a, b, c, d, e, f, g, h = _eight(words, dtype, KIND, ASSEMBLY)
    return _sixteen(a, b, c, d, OUTPUTS), _sixteen(e, f, g, h, OUTPUTS)


@triton.jit
def _sixteen(a, b, c, d, OUTPUTS: tl.constexpr):
    """The numbers of pairs of inputs, [outputs, 4] each -> [outputs, 16]."""
    first, second = tl.reshape(tl.join(a, b), [OUTPUTS, 8]), tl.reshape(tl.join(c, d), [OUTPUTS, 8])
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [OUTPUTS, 16])


_EIGHT_BF16, _EIGHT_F16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


@triton.jit
def _eight(words, dtype: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The numbers of the codes 0, 4, 1, 5, 2, 6, 3 and 7 of each word."""
    if ASSEMBLY == "":
        return (
            _number(words & 15, KIND).to(dtype),
            _number((words >> 16) & 15, KIND).to(dtype),
            _number((words >> 4) & 15, KIND).to(dtype),
            _number((words >> 20) & 15, KIND).to(dtype),
            _number((words >> 8) & 15, KIND).to(dtype),
            _number((words >> 24) & 15, KIND).to(dtype),
            _number((words >> 12) & 15, KIND).to(dtype),
            _number((words >> 28) & 15, KIND).to(dtype),
        )
    else:
        return tl.inline_asm_elementwise(
            ASSEMBLY,
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            args=[words],
            dtype=_EIGHT_BF16 if dtype == tl.bfloat16 else _EIGHT_F16,
            is_pure=True,
            pack=1,
        )


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
):
    lane, begin = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * INPUTS
    there, output = lane < outputs, tl.minimum(lane, outputs - 1).to(tl.int64)
    k = begin + tl.arange(0, INPUTS)
    if KIND < 4:
        word = begin // 8 + tl.arange(0, INPUTS // 8)
        words = _load(codes, output, word, word < inputs // 8, inputs // 8, False)
        number = _in_order(words, KIND, OUTPUTS, INPUTS)
    else:
        number = _one(codes, output, k, k < inputs, inputs, KIND, False)
    factor = _factor(multiplier, output, MULTIPLIED)
    number = _scaled(number, scales, zeros, factor, output, begin, groups, OF_SCALES, GROUP, ZEROS, INPUTS)
    at, used = wide + output[:, None] * inputs + k[None, :], there[:, None] & (k < inputs)[None, :]
    tl.store(at, number.to(wide.dtype.element_ty), mask=used)


@triton.jit
def _in_order(words, KIND: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """[outputs, inputs / 8] -> float32 [outputs, inputs]."""
    a, b, c, d, e, f, g, h = _eight(words, tl.float32, KIND, "")
    runs: tl.constexpr = INPUTS // 32
    first, second = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    every = tl.reshape(tl.join(first, second), [OUTPUTS, runs, 4, 2, 2, 2])  # run, word, half, pair, of 16 inputs
    return tl.reshape(tl.permute(every, (0, 1, 5, 4, 2, 3)), [OUTPUTS, INPUTS])


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
def _one(codes, output, k, known, width, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers of eight bits, float32; a weight that is not coded is as it is."""
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
    number,
    scales,
    zeros,
    factor,
    output,
    begin,
    groups,
    OF_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """(number - zero) * scale * factor, float32 [outputs, inputs of a block]. factor: of an output; a scale without
    it may be beyond float16."""
    scale = _of_groups(scales, factor, number, output, begin, groups, OF_SCALES, GROUP, INPUTS)
    if ZEROS:
        one = tl.full(output.shape, 1.0, tl.float32)
        number -= _of_groups(zeros, one, number, output, begin, groups, 0, GROUP, INPUTS)
    return number * scale


@triton.jit
def _of_groups(
    numbers,
    factor,
    like,
    output,
    begin,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """What a block's groups have, times the factor, float32, spread over the shape of `like`."""
    at = numbers + output * groups
    if GROUP > 0 and GROUP < INPUTS:
        runs: tl.constexpr = INPUTS // GROUP
        group = begin // GROUP + tl.arange(0, runs)
        found = _wide(tl.load(at[:, None] + group[None, :], mask=(group < groups)[None, :], other=0), BITS)
        found *= factor[:, None]
        spread = tl.reshape(tl.broadcast_to(found[:, :, None], (like.shape[0], runs, GROUP)), like.shape)
    else:
        if GROUP > 0:
            at += begin // GROUP
        spread = tl.broadcast_to((_wide(tl.load(at), BITS) * factor)[:, None], like.shape)
    return spread
