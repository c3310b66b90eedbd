"""Types whose codes are rows of a grid: IQ1, IQ2 and IQ3, 256 inputs a block.

An index names a row of the type's grid: the sizes of 8 neighbouring inputs (IQ3: 4), each as a place among at most
eight sizes. Signs are stored beside it. So a size and a sign are a code of four bits, and a table of 16 holds what
they stand for: these types become four-bit codes exactly.

IQ1_S, IQ1_M              weight = (-1, 0 or 1, and 1/8 more or less) * scale; the table has eight times that
IQ2_XXS, IQ2_XS, IQ2_S    sizes 8, 25, 43
IQ3_XXS, IQ3_S            eight sizes

In the XXS types and IQ2_XS seven signs are stored; the eighth makes the number of minus signs even.

`grids.safetensors` has the grids: uint8 [rows, inputs], places. It was recorded from the library of the format, by
`tests/gpu_worker/models/weights/formats/record.py`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import joined
from petiole.gpu_worker.models.checkpoint.gguf.fields import Parts, fields, split, word16, word32

_SIGN = 3
"""This bit of a code."""


def _table(*sizes: float) -> tuple[float, ...]:
    half = (*map(float, sizes), *(0.0,) * (8 - len(sizes)))
    return *half, *(-size for size in half)


_ONE, _EIGHTH = (-8.0, 0.0, 8.0), (1.0, -1.0)
ONES = tuple(number for eighth in _EIGHTH for number in (*(one + eighth for one in _ONE), *(0.0,) * 5))
IQ2 = _table(8, 25, 43)
IQ3_XXS = _table(4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = _table(1, 3, 5, 7, 9, 11, 13, 15)
"""What codes stand for. In `ONES` the sign is that of the eighth."""


@lru_cache(maxsize=1)
def _grids() -> dict[str, Tensor]:
    return load_file(Path(__file__).with_name("grids.safetensors"))


@lru_cache(maxsize=1)
def _even_signs() -> Tensor:
    """uint8 [128]: eight signs by seven of them."""
    seven = torch.arange(128, dtype=torch.uint8)
    return seven | fields(seven[:, None], 1, 1).sum(-1).to(torch.uint8) % 2 << 7


def _codes(name: str, rows: Tensor, signs: Tensor) -> Tensor:
    """rows: [n, blocks, rows of the grid]. signs: a bit for each input, [n, blocks, 256]. -> [n, blocks, 128]."""
    return joined(_grids()[name][rows.int()].flatten(-2) | signs << _SIGN)


def _bits(signs: Tensor) -> Tensor:
    """uint8 [n, blocks, 32] -> [n, blocks, 256]."""
    return fields(signs, 1, 1)


def _scales(d: Tensor, steps: Tensor, factor: float) -> Tensor:
    return d.float()[..., None] * (0.5 + steps) * factor


def _shifted(words: Tensor, *shifts: int) -> Tensor:
    """[..., n] -> [..., n * shifts]."""
    return (words[..., None] >> torch.tensor(shifts)).flatten(-2)


def iq2_xxs(blocks: Tensor, d: Tensor) -> Parts:
    """For 32 inputs four indices, and a word of four times seven signs and a scale."""
    pairs = split(blocks[..., 2:], 8, 8)
    words = word32(pairs[..., 4:].flatten(-2))
    signs = _bits(_even_signs()[_shifted(words, 0, 7, 14, 21) & 127])
    return _codes("IQ2_XXS", pairs[..., :4].flatten(-2), signs), _scales(d, words >> 28, 0.25), None


def iq2_xs(blocks: Tensor, d: Tensor) -> Parts:
    words = word16(blocks[..., 2:66])
    codes = _codes("IQ2_XS", words & 511, _bits(_even_signs()[words >> 9]))
    return codes, _scales(d, fields(blocks[..., 66:], 4, 1), 0.25), None


def iq2_s(blocks: Tensor, d: Tensor) -> Parts:
    rows = blocks[..., 2:34].int() | fields(blocks[..., 66:74], 2, 1).int() << 8
    codes = _codes("IQ2_S", rows, _bits(blocks[..., 34:66]))
    return codes, _scales(d, fields(blocks[..., 74:], 4, 1), 0.25), None


def iq3_xxs(blocks: Tensor, d: Tensor) -> Parts:
    words = word32(blocks[..., 66:])
    signs = _bits(_even_signs()[_shifted(words, 0, 7, 14, 21) & 127])
    return _codes("IQ3_XXS", blocks[..., 2:66], signs), _scales(d, words >> 28, 0.5), None


def iq3_s(blocks: Tensor, d: Tensor) -> Parts:
    rows = blocks[..., 2:66].int() | fields(blocks[..., 66:74], 1, 1).int() << 8
    codes = _codes("IQ3_S", rows, _bits(blocks[..., 74:106]))
    return codes, _scales(d, fields(blocks[..., 106:], 4, 1), 2.0), None


def iq1_s(blocks: Tensor, d: Tensor) -> Parts:
    """For 32 inputs a word: high bits of four indices, a scale, the sign of the eighths."""
    words = word16(blocks[..., 34:])
    rows = blocks[..., 2:34].int() | (_shifted(words, 0, 3, 6, 9) & 7) << 8
    signs = (words >> 15).to(torch.uint8).repeat_interleave(32, -1)
    return _codes("IQ1", rows, signs), _scales(d, words >> 12 & 7, 0.25), None


def iq1_m(blocks: Tensor, d: Tensor) -> Parts:
    """For 8 inputs half a byte: high bits of the index, the sign of the eighths."""
    high = fields(blocks[..., 32:48], 4, 1)
    rows = blocks[..., :32].int() | (high & 7).int() << 8
    steps = _shifted(word16(blocks[..., 48:]), 0, 3, 6, 9) & 7
    return _codes("IQ1", rows, (high >> 3).repeat_interleave(8, -1)), _scales(d, steps, 0.25), None
