"""Codes of four bits: what they stand for, tables of 16 numbers, and how they lie, two a byte, the one with the
lower input in the lower half. Codes of six bits are numbers from -32 to 31, of which 32 more is kept: of a row the
lower four bits of all, as those of four bits lie, then the upper two, four a byte."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNED = tuple(float(value) for value in range(-8, 8))
UNSIGNED = tuple(float(value) for value in range(16))
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))
"""Integers whose zero is 8, integers with zeros beside them, and floats with two bits of exponent and one of
mantissa."""
SIX = range(-32, 32)
"""Numbers of six bits."""


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n], the lower half of each byte first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """The inverse of `nibbles`, with a zero after an odd number of codes."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16)
    return ((pairs | pairs >> 4) & 0xFF).to(torch.uint8)


def sixes(numbers: Tensor) -> Tensor:
    """int8 [..., n], each in `SIX` -> uint8 [..., 3 n / 4]. n: a multiple of four."""
    codes = (numbers + 32).view(torch.uint8)
    upper = codes.view(*codes.shape[:-1], -1, 4) >> 4
    fours = upper[..., 0] | upper[..., 1] << 2 | upper[..., 2] << 4 | upper[..., 3] << 6
    return torch.cat((joined(codes & 15), fours), -1)


def of_sixes(packed: Tensor) -> Tensor:
    """The inverse of `sixes`."""
    at = packed.shape[-1] // 3 * 2
    fours = packed[..., at:]
    upper = torch.stack([fours >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    return (nibbles(packed[..., :at]) | upper << 4).view(torch.int8) - 32
