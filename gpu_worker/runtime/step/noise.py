"""Sampling noise as a pure function of (seed, position, token).

With a stateful generator, a request's tokens would depend on the rest of its batch. Here each number is a hash:
the host mixes seed and position into two words, and the device mixes these with the token id. A request gets the
same noise in any row, batch and worker, and on any device up to the last bit of a logarithm.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ADDED, _FIRST, _SECOND, _30, _27, _31 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31)
)
_ONE = 1.0 - 2.0**-24


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [n, 2] from seeds [n] and the positions [n] of the tokens to be drawn."""
    mixed = _splitmix64(_splitmix64(positions.astype(np.uint64)) + seeds)
    return mixed.view(np.int32).reshape(-1, 2)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Splitmix64, in place: every step makes keys, and allocating an array costs more than the arithmetic."""
    x += _ADDED
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [n, K] of standard Gumbel noise for keys int32 [n, 2] and token ids int32 [K] or [n, K]."""
    x = token_ids * _signed(0x9E3779B1) + keys[:, :1]
    x = _mix(x)
    x ^= keys[:, 1:]
    x = _mix(x)
    uniform = (((x >> 1) & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    exponential = torch.log1p(-uniform.clamp_(max=_ONE)).neg_()
    return exponential.log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A full-avalanche permutation of 32-bit words, in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
