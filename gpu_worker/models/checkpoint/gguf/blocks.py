"""Tensors of GGUF files: from blocks to codes and numbers. A block holds neighbouring inputs of one output.

Most types pack *fields* of 1, 2 or 4 bits into runs of bytes: the lowest bits of the bytes of a run belong to its
first inputs, the next bits to the next ones (`fields`). A type's bytes, in order; d and m are float16:

Q4_0, Q4_1, Q5_0, Q5_1   32 inputs: d; m in the _1 types; in Q5 the fifth bits; low bits.  d * code, or + m
Q8_0                     32 inputs: d, signed codes
Q2_K                     256 inputs: scales and minimums of 16 inputs (4 bits each), codes of 2 bits, d, m
Q3_K                     third bits, low bits, scales of six bits, d
Q4_K, Q5_K               d, m, scales and minimums of 32 inputs (6 bits each), fifth bits, low bits
Q6_K                     low four bits, high two, signed scales of 16 inputs, d
IQ4_NL, IQ4_XS           codes of a table; in XS scales of 32 inputs
TQ1_0, TQ2_0             256 inputs with one scale, of -1, 0, 1: five in a byte to the base 3, or 2 bits each
MXFP4, NVFP4             floats of four bits; scales of 32 inputs are powers of two, of 16 inputs E4M3
IQ1, IQ2, IQ3            see `grids`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED, joined, nibbles
from petiole.gpu_worker.models.checkpoint.gguf import grids
from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.fields import Parts, fields, pairs_of_fields, split, word16

IQ4 = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
"""What codes of IQ4 stand for."""

_POWERS_OF_3 = (1, 3, 9, 27, 81)
_NO_NUMBER = 0x7F
"""The code of E4M3 that is no number."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of weights [n, inputs]; scales and, if there are any, offsets [n, groups]. A code is a place in
    `table`, two a byte; without a table it is a number with a sign, a byte each.

    weight = number * scale + offset, exactly the file's in float32. Scales and offsets are steps where there are
    factors: [n, blocks], of which each belongs to the groups of its block."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    table: tuple[float, ...] = ()
    factors: Tensor | None = None
    offset_factors: Tensor | None = None

    def values(self) -> Tensor:
        """float32 [n, inputs]."""
        numbers = torch.tensor(self.table)[nibbles(self.codes).int()] if self.table else self.codes.float()
        values = split(numbers, self.scales.shape[1], -1) * _times(self.scales, self.factors)[..., None]
        if self.offsets is not None:
            values = values.add_(_times(self.offsets, self.offset_factors)[..., None])
        return values.flatten(1)


def _times(steps: Tensor, factors: Tensor | None) -> Tensor:
    if factors is None:
        return steps.float()
    return steps.float() * factors.float().repeat_interleave(steps.shape[1] // factors.shape[1], 1)


Factors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Coding:
    """How a type keeps codes. factors: from blocks, uint8 [n, blocks, bytes], to what scales are made of, each [n,
    blocks] or [n, blocks, groups]; one that is no finite number is damage. read: blocks and factors as parts.
    group: inputs with one scale. scales: the type that holds them exactly. offsets: whether there are any. steps:
    whether scales and offsets are steps; then `read` does not take the factors, which are d and perhaps m:
    minimums are taken away. six: whether numbers, of which there is no table, have six bits at most."""

    read: Callable[..., Parts]
    factors: Callable[[Tensor], Factors]
    group: int
    table: tuple[float, ...] = ()
    scales: torch.dtype = torch.float32
    offsets: bool = False
    steps: bool = False
    six: bool = False

    def codes(self, blocks: Tensor) -> Codes:
        factors = self.factors(blocks)
        codes, scales, offsets = self.read(blocks, *(() if self.steps else factors))
        return Codes(
            codes.flatten(1),
            scales.flatten(1),
            None if offsets is None else offsets.flatten(1),
            self.table,
            factors[0] if self.steps else None,
            -factors[1] if self.steps and offsets is not None else None,
        )


def _at(*places: int) -> Callable[[Tensor], Factors]:
    """float16 at these bytes of each block."""
    return lambda blocks: tuple(blocks.view(torch.float16)[..., at // 2].contiguous() for at in places)


# ------------------------------------------------------------ 32 inputs


def _q4(blocks: Tensor, d: Tensor, m: Tensor | None = None) -> Parts:
    return pairs_of_fields(blocks[..., -16:], 16), d, m


def _q5(blocks: Tensor, d: Tensor, m: Tensor | None = None) -> Parts:
    codes = fields(blocks[..., -16:], 4, 16) | fields(blocks[..., -20:-16], 1, 1) << 4
    return codes.view(torch.int8) - (16 if m is None else 0), d, m


def _q8_0(blocks: Tensor, d: Tensor) -> Parts:
    return blocks[..., 2:].contiguous().view(torch.int8), d, None


def _powers(blocks: Tensor) -> Factors:
    return (blocks[..., :1].contiguous().view(torch.float8_e8m0fnu),)


def _e4m3(blocks: Tensor) -> Factors:
    """The largest code stands for 0. A sign is damage."""
    raw = blocks[..., :4]
    raw = torch.where(raw == _NO_NUMBER, 0, raw)
    return (torch.where(raw > _NO_NUMBER, _NO_NUMBER, raw).view(torch.float8_e4m3fn),)


def _mxfp4(blocks: Tensor, scales: Tensor) -> Parts:
    return pairs_of_fields(blocks[..., 1:], 16), scales, None


def _nvfp4(blocks: Tensor, scales: Tensor) -> Parts:
    return pairs_of_fields(blocks[..., 4:], 8), scales, None


# ------------------------------------------------------------ 256 inputs


def _q2_k(blocks: Tensor) -> Parts:
    steps = blocks[..., :16]
    return joined(fields(blocks[..., 16:80], 2, 32)), steps & 15, steps >> 4


def _q3_k(blocks: Tensor) -> Parts:
    steps = fields(blocks[..., 96:104], 4, 8) | fields(blocks[..., 104:108], 2, 4) << 4
    codes = fields(blocks[..., 32:96], 2, 32) | fields(blocks[..., :32], 1, 32) << 2
    return joined(codes + 4), steps.view(torch.int8) - 32, None


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, and minimums. Four of them, a byte each, are computed at once."""
    words = blocks[..., 4:16].clone(memory_format=torch.contiguous_format).view(torch.int32)
    low, high, rest = (word.contiguous() for word in words.unbind(-1))
    two, four, six = 0x30303030, 0x0F0F0F0F, 0x3F3F3F3F
    steps = torch.stack((low & six, rest & four | low >> 2 & two), -1)
    minimums = torch.stack((high & six, rest >> 4 & four | high >> 2 & two), -1)
    return steps.view(torch.uint8), minimums.view(torch.uint8)


def _q4_k(blocks: Tensor) -> Parts:
    return pairs_of_fields(blocks[..., 16:], 32), *_six_bits(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    codes = fields(blocks[..., 48:], 4, 32) | fields(blocks[..., 16:48], 1, 32) << 4
    return codes.view(torch.int8), *_six_bits(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    codes = fields(blocks[..., 128:192], 2, 32)
    codes.bitwise_left_shift_(4).bitwise_or_(fields(blocks[..., :128], 4, 64))
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes.view(torch.int8).sub_(32), steps, None


def _iq4_xs(blocks: Tensor) -> Parts:
    steps = fields(blocks[..., 4:8], 4, 1) | fields(blocks[..., 2:4], 2, 1) << 4
    return pairs_of_fields(blocks[..., 8:], 16), steps.view(torch.int8) - 32, None


def _tq1_0(blocks: Tensor, d: Tensor) -> Parts:
    runs = (blocks[..., :32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4)
    digits = torch.cat([run * power for run, n in runs for power in _POWERS_OF_3[:n]], -1)  # modulo 256
    return joined(((digits.int() * 3 >> 8) + 7).to(torch.uint8)), d, None


def _tq2_0(blocks: Tensor, d: Tensor) -> Parts:
    return joined(fields(blocks[..., :64], 2, 32) + 7), d, None


def _iq1_m_factor(blocks: Tensor) -> Factors:
    """A float16 whose four parts are the highest bits of four words."""
    high = word16(blocks[..., 48:56]) >> 12
    whole = high[..., 0] | high[..., 1] << 4 | high[..., 2] << 8 | high[..., 3] << 12
    return (torch.where(whole < 2**15, whole, whole - 2**16).to(torch.int16).view(torch.float16),)


_HALF = torch.float16
CODINGS: dict[str, Coding] = {
    "Q4_0": Coding(_q4, _at(0), 32, SIGNED, _HALF),
    "Q4_1": Coding(_q4, _at(0, 2), 32, UNSIGNED, _HALF, offsets=True),
    "Q5_0": Coding(_q5, _at(0), 32, (), _HALF, six=True),
    "Q5_1": Coding(_q5, _at(0, 2), 32, (), _HALF, offsets=True, six=True),
    "Q8_0": Coding(_q8_0, _at(0), 32, (), _HALF),
    "Q2_K": Coding(_q2_k, _at(80, 82), 16, UNSIGNED, offsets=True, steps=True),
    "Q3_K": Coding(_q3_k, _at(108), 16, SIGNED, steps=True),
    "Q4_K": Coding(_q4_k, _at(0, 2), 32, UNSIGNED, offsets=True, steps=True),
    "Q5_K": Coding(_q5_k, _at(0, 2), 32, (), offsets=True, steps=True, six=True),
    "Q6_K": Coding(_q6_k, _at(208), 16, steps=True, six=True),
    "IQ1_S": Coding(grids.iq1_s, _at(0), 32, grids.ONES),
    "IQ1_M": Coding(grids.iq1_m, _iq1_m_factor, 16, grids.ONES),
    "IQ2_XXS": Coding(grids.iq2_xxs, _at(0), 32, grids.IQ2),
    "IQ2_XS": Coding(grids.iq2_xs, _at(0), 16, grids.IQ2),
    "IQ2_S": Coding(grids.iq2_s, _at(0), 16, grids.IQ2),
    "IQ3_XXS": Coding(grids.iq3_xxs, _at(0), 32, grids.IQ3_XXS),
    "IQ3_S": Coding(grids.iq3_s, _at(0), 32, grids.IQ3_S),
    "IQ4_NL": Coding(_q4, _at(0), 32, IQ4, _HALF),
    "IQ4_XS": Coding(_iq4_xs, _at(0), 32, IQ4, steps=True),
    "TQ1_0": Coding(_tq1_0, _at(52), 256, SIGNED, _HALF),
    "TQ2_0": Coding(_tq2_0, _at(64), 256, SIGNED, _HALF),
    "MXFP4": Coding(_mxfp4, _powers, 32, E2M1, torch.float8_e8m0fnu),
    "NVFP4": Coding(_nvfp4, _e4m3, 16, E2M1, torch.float8_e4m3fn),
}
"""By type of tensor."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def in_blocks(raw: Tensor, kind: str) -> Tensor:
    """uint8 [n, bytes of a row] -> [n, blocks, bytes of a block]."""
    return split(raw, -1, TYPES[kind].n_bytes)


def values_of(raw: Tensor, kind: str) -> Tensor:
    """uint8 [n, bytes of a row] -> numbers [n, inputs], in float32 if the type is quantised."""
    if kind in _PLAIN:
        return raw.contiguous().view(_PLAIN[kind])
    return CODINGS[kind].codes(in_blocks(raw, kind)).values()
