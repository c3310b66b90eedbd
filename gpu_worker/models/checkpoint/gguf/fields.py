"""How blocks pack small numbers."""

from __future__ import annotations

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and offsets of blocks; each [n, blocks, ...]. Codes of four bits lie two a byte."""


_WHOLE = {4: torch.float32, 8: torch.float64, 16: torch.complex128}
"""Types of so many bytes, as which these are copied at once."""


def fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [..., bytes] -> uint8 [..., bytes * 8 / bits]: of each `run` bytes the lowest bits, then the next."""
    runs = split(packed, -1, run)
    found = torch.empty((*runs.shape[:-1], 8 // bits, run), dtype=torch.uint8)
    for i, at in enumerate(range(0, 8, bits)):
        torch.bitwise_and(runs >> at, 2**bits - 1, out=found[..., i, :])
    return found.flatten(-3)


def pairs_of_fields(packed: Tensor, run: int) -> Tensor:
    """`fields` of four bits, two a byte: uint8 [..., bytes] -> uint8 [..., bytes]."""
    words = _aligned(packed).view(torch.int16)  # of four codes each: two of a run's first half, two of the second
    high = words >> 4
    low = (high & 0xF0).bitwise_or_(words & 15)
    high.bitwise_and_(15).bitwise_or_(words.bitwise_right_shift_(8).bitwise_and_(0xF0))
    half = _WHOLE[run // 2]
    found = torch.empty((*packed.shape[:-1], packed.shape[-1] // run, 2), dtype=half)
    found[..., 0], found[..., 1] = (one.to(torch.uint8).view(half) for one in (low, high))
    return found.view(torch.uint8).flatten(-2)


def split(tensor: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def word16(raw: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> int32 [..., n], from 0 to 65,535."""
    return _aligned(raw).view(torch.int16).int() & 0xFFFF


def word32(raw: Tensor) -> Tensor:
    """uint8 [..., 4 n] -> int64 [..., n], from 0 to 2^32 - 1."""
    return _aligned(raw).view(torch.int32).long() & 0xFFFFFFFF


def _aligned(raw: Tensor) -> Tensor:
    """A copy: a part of one block is contiguous, and may begin at any byte."""
    return raw.clone(memory_format=torch.contiguous_format)
