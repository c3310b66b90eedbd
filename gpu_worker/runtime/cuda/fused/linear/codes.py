"""How codes of four and eight bits become numbers in the kernels of `grouped`."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED
from petiole.gpu_worker.models.weights.quantized import RUN, Coded

_TABLES = {SIGNED: 1, UNSIGNED: 2, E2M1: 3}
_PLAIN, _INTEGERS, _E4M3 = 0, 4, 5
"""How a code becomes a number; eight-bit floats are read as bits, because older cards have no such type."""

_BITS = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2}
"""The same for scales."""

_FOUR_RUNS = 4 * RUN
"""Inputs of a block whose codes have four bits."""

_FLOATS = {
    torch.bfloat16: ("bf16", 0x3F803F80, 0x43004300, 0x7E807E80, {1: 0xC308C308, 2: 0xC300C300}, 6),
    torch.float16: ("f16", 0x3C003C00, 0x64006400, 0x74007400, {1: 0xE408E408, 2: 0xE400E400}, 9),
}
"""What PTX calls a type, and twice each: 1; 128 or 1024, whose last bit is worth 1; the power of two that corrects
an exponent of E2M1; and what is added to an integer, by the kind of its code. Then where the lowest of E2M1's bits
goes."""


class CodedWeight(NamedTuple):
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
    in_tiles: bool = False

    @staticmethod
    def of(weight: Tensor | Coded) -> CodedWeight:
        if not isinstance(weight, Coded):
            return CodedWeight(weight, weight, weight, weight)
        form, scales = weight.form, weight.scales
        floats = form.codes == torch.float8_e4m3fn
        kind = _TABLES[form.table] if form.table else _E4M3 if floats else _INTEGERS
        assert form.in_runs or not form.table
        codes = weight.codes.view(torch.int32 if form.table else torch.uint8 if floats else torch.int8)
        of_scales = _BITS.get(scales.dtype, 0)
        return CodedWeight(
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
            form.in_tiles,
        )

    def exact(self, width: int) -> bool:
        """Whether codes are multiplied by the rows unscaled, in blocks of so many inputs."""
        of_bytes = self.kind != _PLAIN and not self.has_zeros and (self.groups == 1 or self.group >= width)
        return self.of_four_bits or of_bytes

    @property
    def of_four_bits(self) -> bool:
        return self.kind in _TABLES.values()

    def width(self, inputs: int, most: int) -> int:
        """Inputs of a block."""
        return _FOUR_RUNS if self.of_four_bits else min(most, triton.next_power_of_2(max(inputs, 32)))

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for. GROUP: inputs of a group; 0: all of them."""
        return {
            "KIND": self.kind,
            "OF_SCALES": self.of_scales,
            "GROUP": 0 if self.groups == 1 else self.group,
            "ZEROS": self.has_zeros,
            "MULTIPLIED": self.multiplied,
            "TILED": self.in_tiles,
        }


def assembly(kind: int, dtype: torch.dtype) -> str:
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


_BYTES = {
    torch.bfloat16: (4, 0x7B807B80, 0x43004300, 0xC300C300),
    torch.float16: (1, 0x5C005C00, 0x64006400, 0xE400E400),
}
"""Of eight bits: how far the bits of a float with four of exponent lie from those of a wider one, and the power of
two that corrects the exponent; 128 or 1024, whose last bit is worth 1, and its negative. Twice each."""


def assembly_of_bytes(kind: int, dtype: torch.dtype) -> str:
    """The same for four numbers of eight bits in a word; an integer's sign is the last bit of what is taken away
    from its other bits."""
    if triton.knobs.runtime.interpret or kind not in (_INTEGERS, _E4M3) or dtype not in _FLOATS:
        return ""
    name, one, *_ = _FLOATS[dtype]
    right, exponent, first, less = _BYTES[dtype]
    half, of_floats = 0x7F00 >> right, kind == _E4M3
    lines = [f"mov.b32 times, {exponent if of_floats else one:#x};"]
    lines += ["mov.b32 plus, 0x80008000;"] if of_floats else []
    for i in range(2):
        if of_floats:
            lines += [
                f"prmt.b32 t, $2, 0, {0x1404 + 0x2020 * i:#x};",
                "and.b32 s, t, 0x80008000;",
                f"shr.u32 t, t, {right};",
                f"lop3.b32 t, t, {half << 16 | half:#x}, s, 0xea;",
                f"fma.rn.{name}x2 ${i}, t, times, plus;",
            ]
        else:
            lines += [
                f"prmt.b32 t, $2, 0, {0x4140 + 0x0202 * i:#x};",
                f"lop3.b32 s, t, 0x00800080, {less:#x}, 0xea;",
                f"lop3.b32 t, t, 0x007f007f, {first:#x}, 0xea;",
                f"fma.rn.{name}x2 ${i}, t, times, s;",
            ]
    return "{ .reg .b32 s, t, times, plus; " + " ".join(lines) + " }"


@triton.jit
def load_groups(numbers, output, begin, groups, GROUP: tl.constexpr, INPUTS: tl.constexpr):
    """The scales or the zeros of a block: [outputs, 4], one for each run of 32 inputs; [outputs, 8], one for each
    half of a run, where groups have 16."""
    runs: tl.constexpr = INPUTS // (16 if GROUP == 16 else 32)
    group = tl.arange(0, runs) * 0
    if GROUP > 0:
        group = tl.minimum((begin + INPUTS // runs * tl.arange(0, runs)) // GROUP, groups - 1)
    return tl.load(numbers + output[:, None] * groups + group[None, :])


@triton.jit
def halves_of_runs(of_groups, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """What `load_groups` gives -> what each half of the four runs has, [outputs] each."""
    if GROUP == 16:
        first, second = tl.split(tl.reshape(of_groups, [OUTPUTS, 4, 2]))
    else:
        first, second = of_groups, of_groups
    a, c, e, g = _columns(first, OUTPUTS)
    b, d, f, h = _columns(second, OUTPUTS)
    return a, b, c, d, e, f, g, h


@triton.jit
def _columns(four, OUTPUTS: tl.constexpr):
    even, odd = tl.split(tl.reshape(four, [OUTPUTS, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def in_four(words, OUTPUTS: tl.constexpr, TILED: tl.constexpr):
    """[outputs, 16] -> the words of each of the four runs, [outputs, 4] each."""
    by_run = words if TILED else tl.permute(tl.reshape(words, [OUTPUTS, 4, 4]), (0, 2, 1))
    in_pairs = tl.reshape(by_run, [OUTPUTS, 4, 2, 2])
    even, odd = tl.split(in_pairs)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def operands(words, dtype: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr, OUTPUTS: tl.constexpr):
    """Words of 32 inputs, [outputs, 4] -> what the codes of the first and the last 16 stand for, [outputs, 16]."""
    a, b, c, d, e, f, g, h = eight_numbers(words, dtype, KIND, ASSEMBLY)
    return _sixteen(a, b, c, d, OUTPUTS), _sixteen(e, f, g, h, OUTPUTS)


@triton.jit
def _sixteen(a, b, c, d, OUTPUTS: tl.constexpr):
    """The numbers of pairs of inputs, [outputs, 4] each -> [outputs, 16]."""
    first, second = tl.reshape(tl.join(a, b), [OUTPUTS, 8]), tl.reshape(tl.join(c, d), [OUTPUTS, 8])
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [OUTPUTS, 16])


_EIGHT_BF16, _EIGHT_F16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


@triton.jit
def eight_numbers(words, dtype: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
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
def of_bytes(found, dtype: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The numbers of codes of eight bits, of a type of 16 bits."""
    if ASSEMBLY == "":
        return float_of(found, 2 if KIND == 5 else 0).to(dtype)
    else:
        return tl.inline_asm_elementwise(
            ASSEMBLY,
            "=r,=r,r",
            args=[found],
            dtype=tl.bfloat16 if dtype == tl.bfloat16 else tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def in_order(words, KIND: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TILED: tl.constexpr):
    """[outputs, inputs / 8] -> float32 [outputs, inputs]."""
    a, b, c, d, e, f, g, h = eight_numbers(words, tl.float32, KIND, "")
    runs: tl.constexpr = INPUTS // 32
    first, second = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    every = tl.join(first, second)
    if TILED:
        every = tl.permute(tl.reshape(every, [OUTPUTS, 4, runs, 8]), (0, 2, 1, 3))
    every = tl.reshape(every, [OUTPUTS, runs, 4, 2, 2, 2])  # run, word, half, pair, of 16 inputs
    return tl.reshape(tl.permute(every, (0, 1, 5, 4, 2, 3)), [OUTPUTS, INPUTS])


@triton.jit
def factor_of(multiplier, output, MULTIPLIED: tl.constexpr):
    """The factor of each output, float32."""
    return tl.load(multiplier + output) if MULTIPLIED else tl.full(output.shape, 1.0, tl.float32)


@triton.jit
def load_codes(codes, output, k, known, width, ALIGNED: tl.constexpr):
    at = codes + output[:, None] * width + k[None, :]
    if ALIGNED:
        return tl.load(at)
    return tl.load(at, mask=known[None, :], other=0)


@triton.jit
def number_of(codes, output, k, known, width, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers of eight bits, float32; a weight that is not coded is as it is."""
    found = load_codes(codes, output, k, known, width, ALIGNED)
    return found if KIND == 0 else float_of(found, 2 if KIND == 5 else 0)


@triton.jit
def load_rows(rows, k, used, known, ALIGNED: tl.constexpr):
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
def float_of(number, BITS: tl.constexpr):
    """float32. BITS: 1: the exponent of a power of two (E8M0); 2: four bits of exponent and three of mantissa."""
    if BITS == 1:
        return (number.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if BITS == 2:
        bits = number.to(tl.int32)
        magnitude = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        return tl.where(bits > 127, -magnitude, magnitude)
    return number.to(tl.float32)


@triton.jit
def scaled(
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
    """(number - zero) * scale * factor, float32 [outputs, inputs of a block]. factor: of an output; a scale
    without it may be beyond float16."""
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
        found = float_of(tl.load(at[:, None] + group[None, :], mask=(group < groups)[None, :], other=0), BITS)
        found *= factor[:, None]
        spread = tl.reshape(tl.broadcast_to(found[:, :, None], (like.shape[0], runs, GROUP)), like.shape)
    else:
        if GROUP > 0:
            at += begin // GROUP
        spread = tl.broadcast_to((float_of(tl.load(at), BITS) * factor)[:, None], like.shape)
    return spread
