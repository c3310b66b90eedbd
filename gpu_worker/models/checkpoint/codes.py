"""Codes of four bits: what they stand for, tables of 16 numbers, and how they lie, two a byte, the one with the
lower input in the lower half."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNED = tuple(float(value) for value in range(-8, 8))
UNSIGNED = tuple(float(value) for value in range(16))
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))
"""Integers whose zero is 8, integers with zeros beside them, and floats with two bits of exponent and one of
mantissa."""


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n], the lower half of each byte first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """The inverse of `nibbles`, with a zero after an odd number of codes."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16)
    return ((pairs | pairs >> 4) & 0xFF).to(torch.uint8)
