"""Large tensors in the host's memory, in pages of 2 MB if the system has them.

A step on the CPU reads all weights. With pages of 4 KB the processor looks up an address every few cache lines,
and a load waits while the system hands out the pages one by one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_PAGE, _SMALL_PAGE, _LINE = 2 * 2**20, 4096, 64


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is not initialised, like `torch.empty`."""
    mapped = _mapped(shape, dtype, device)
    return torch.empty(tuple(shape), dtype=dtype, device=device) if mapped is None else mapped


class Room:
    """Memory for what lies one after the other, in pages of 2 MB if the system has them. The part that is not used
    yet costs nothing: the system hands out a page when something is written to it. least: the bytes that it asks
    the system for, at least."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._kept: list[Tensor] = []
        self._used = 0

    def at_least(self, n_bytes: int) -> Tensor:
        """The free bytes, this many or more: uint8."""
        if not self._kept or self._kept[-1].nbytes - self._used < n_bytes:
            self._kept.append(new_tensor((max(n_bytes, self._least),), torch.uint8, torch.device("cpu")))
            self._used = 0
        return self._kept[-1][self._used :]

    def take(self, n_bytes: int) -> None:
        """The first of the free bytes are used. The next ones begin on a line of the cache."""
        self._used = min(self._used + -(-n_bytes // _LINE) * _LINE, self._kept[-1].nbytes)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Large ones have memory of their own, which can be given back."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if not 0 < n_bytes < _PAGE:
            return new_tensor(shape, dtype, torch.device("cpu"))
        found = self.at_least(n_bytes)[:n_bytes].view(dtype).view(tuple(shape))
        self.take(n_bytes)
        return found


def new_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory is allocated now, not during the first steps."""
    mapped = _mapped(shape, dtype, device)
    if mapped is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    mapped.view(-1)[:: _SMALL_PAGE // dtype.itemsize] = 0  # the system has cleared the rest
    return mapped


def _mapped(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Zeros in large pages, not yet allocated; None if the tensor is small, or the system has no large pages."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or n_bytes < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, -(-n_bytes // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too large for the system: torch raises its own error
        return None
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))
