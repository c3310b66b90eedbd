"""Rotary position embedding as one table: row p holds the cosines and then the sines of position p."""

from __future__ import annotations

import math

import torch

from petiole.gpu_worker.models.config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, n_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [n_positions, head_dim]: cos [head_dim / 2] | sin [head_dim / 2], scaled by the amplitude."""
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    angles = torch.arange(n_positions, device=device, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.amplitude


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], after the checkpoint's scaling for long contexts."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Scales long wavelengths by `factor`, keeps short ones, and interpolates between them by wavelength."""
    turns = rope.original_max_position * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """As `_llama3`, but interpolates by dimension index, between two numbers of turns."""

    def dimension_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / rope.factor * stretched + base * (1 - stretched)
