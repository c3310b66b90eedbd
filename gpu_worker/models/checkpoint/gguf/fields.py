"""How blocks pack small numbers."""

from __future__ import annotations

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and offsets of blocks; each [n, blocks, ...]."""


def fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [..., bytes] -> uint8 [..., bytes * 8 / bits]: of each `run` bytes the lowest bits, then the next."""
    runs = split(packed, -1, run)
    return torch.stack([runs >> at & 2**bits - 1 for at in range(0, 8, bits)], -2).flatten(-3)


def split(tensor: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def halves(raw: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> float16 [..., n]."""
    return _aligned(raw).view(torch.float16)


def word16(raw: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> int32 [..., n], from 0 to 65,535."""
    return _aligned(raw).view(torch.int16).int() & 0xFFFF


def word32(raw: Tensor) -> Tensor:
    """uint8 [..., 4 n] -> int64 [..., n], from 0 to 2^32 - 1."""
    return _aligned(raw).view(torch.int32).long() & 0xFFFFFFFF


def _aligned(raw: Tensor) -> Tensor:
    """A copy: a part of one block is contiguous, and may begin at any byte."""
    return raw.clone(memory_format=torch.contiguous_format)
