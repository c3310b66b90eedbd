"""Rotary position embedding as tables: row p holds the cosines and then the sines of position p.

A table is as wide as the part of a head that turns: element i of its first half turns with element i of its second
half, and the rest of the head stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import rms_norm
from petiole.gpu_worker.models.plan import Rotary


def rotary_table(rotary: Rotary, n_positions: int, device: torch.device) -> Tensor:
    """float32 [n_positions, dims]: cos [dims / 2] | sin [dims / 2], scaled by the amplitude."""
    frequencies = inverse_frequencies(rotary).to(device)
    angles = torch.arange(n_positions, device=device, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rotary.amplitude


def inverse_frequencies(rotary: Rotary) -> Tensor:
    """float32 [dims / 2], after the checkpoint's scaling for long contexts."""
    dims = rotary.dims
    base = 1.0 / rotary.theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)
    if rotary.kind == "linear":
        return base / rotary.factor
    if rotary.kind == "llama3":
        return _llama3(rotary, base)
    if rotary.kind == "yarn":
        return _yarn(rotary, base)
    if rotary.kind == "longrope":
        return base / torch.tensor(rotary.short_factors, dtype=torch.float32)
    if rotary.kind == "axial":
        return (1.0 / rotary.theta ** (torch.arange(0, dims, 4, dtype=torch.int64).float() / dims)).repeat(2)
    if rotary.kind == "proportional":
        turning = int(rotary.fraction * dims / 2)
        return torch.cat([base[:turning], torch.zeros(dims // 2 - turning)]) / rotary.factor
    return base


def _llama3(rotary: Rotary, base: Tensor) -> Tensor:
    """Scales long wavelengths by `factor`, keeps short ones, and interpolates between them by wavelength."""
    turns = rotary.original_max_position * base / (2 * math.pi)
    blend = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * base / rotary.factor + blend * base


def _yarn(rotary: Rotary, base: Tensor) -> Tensor:
    """As `_llama3`, but interpolates by dimension index, between two numbers of turns."""

    def dimension_of(turns: float) -> float:
        ratio = rotary.original_max_position / (turns * 2 * math.pi)
        return rotary.dims * math.log(ratio) / (2 * math.log(rotary.theta))

    low, high = dimension_of(rotary.beta_fast), dimension_of(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dims - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(rotary.dims // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / rotary.factor * stretched + base * (1 - stretched)


def table_by_axes(rotary: Rotary, table: Tensor, positions: Tensor) -> Tensor:
    """[T, dims]: the rows of a table for positions of several axes, integers [axes, T], of which each frequency
    turns by its own. Raises ValueError for a rotation that has no axes."""
    if not rotary.axes:
        raise ValueError(f"rotary positions: must be of one axis, got {list(positions.shape)}")
    of_axes = table[positions]
    found = of_axes[0]
    for axis in range(1, len(of_axes)):
        found = torch.where(_turned_by(axis, rotary.axes, table.device), of_axes[axis], found)
    return found


@cache
def _turned_by(axis: int, axes: tuple[int, ...], device: torch.device) -> Tensor:
    """bool [dims]: the columns of a table that turn by this axis. Kept, because the GPU waits for each copy."""
    return torch.tensor([one == axis for one in axes] * 2, device=device)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The transformation of queries and keys before attention: an RMS norm of each head, if the model has one,
    then rotary embedding.

    norms: weights [D] of the queries' norm and of the keys'. positions: integers [T], rows of the table. table:
    see `rotary_table`; None: nothing is rotated. A decoder whose positions have several axes makes a table of its
    own for each step. neighbours: see `plan.Rotary`."""

    norms: tuple[Tensor, Tensor] | None
    eps: float
    positions: Tensor
    table: Tensor | None
    neighbours: bool = False

    def __post_init__(self) -> None:
        if self.positions.dim() != 1:
            raise ValueError(f"rotary positions: must be of one axis, got {list(self.positions.shape)}")


def rotated(q: Tensor, k: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
    """q [T, Hq, D] and k [T, Hkv, D], in plain torch."""
    if rotation.norms is not None:
        assert k is not None, "without keys, the decoder applies the norm of queries"
        q, k = (rms_norm(x, weight, rotation.eps) for x, weight in zip((q, k), rotation.norms, strict=True))
    if rotation.table is None:
        return q, k
    cos, sin = rotation.table[rotation.positions].unsqueeze(1).chunk(2, dim=-1)
    near = rotation.neighbours
    return _rotate(q, cos, sin, near), None if k is None else _rotate(k, cos, sin, near)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    half = cos.shape[-1]
    if neighbours:
        low, high = x[..., : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
        turned = torch.stack([low * cos - high * sin, high * cos + low * sin], dim=-1).flatten(-2)
        return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
    low, high, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(x.dtype)
