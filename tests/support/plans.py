"""Plans of small models for tests of parts: pre-norm layers as Llama and Qwen3 have them, in sizes to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary
from petiole.gpu_worker.models.weights.formats.unread import is_beside_codes


def plan_of(
    *,
    vocab: int = 64,
    hidden: int = 64,
    inner: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    windows: Sequence[int] = (0,),
    max_position: int = 400,
    normed_heads: bool = True,
    rotary: Rotary | None = None,
    tied_head: bool = True,
) -> ModelPlan:
    norm = Norm()
    of_heads = norm if normed_heads else None
    turned = rotary or Rotary(head_dim)
    mixer = Attention(heads, kv_heads, head_dim, head_dim**-0.5, turned, q_norm=of_heads, k_norm=of_heads)
    layer = Layer(mixer, FeedForward(inner), mixer_norm=norm, feed_forward_norm=norm)
    layers = tuple(replace(layer, mixer=replace(mixer, window=window)) for window in windows)
    return ModelPlan("test", vocab, hidden, layers, norm, max_position, tied_head=tied_head)


def each_layer(plan: ModelPlan, **changes: Any) -> ModelPlan:
    """With these fields in every layer."""
    return replace(plan, layers=tuple(replace(layer, **changes) for layer in plan.layers))


def each_mixer(plan: ModelPlan, **changes: Any) -> ModelPlan:
    mixed = tuple(replace(layer, mixer=replace(layer.mixer, **changes)) for layer in plan.layers)
    return replace(plan, layers=mixed)


def each_feed_forward(plan: ModelPlan, **changes: Any) -> ModelPlan:
    fed = tuple(replace(one, feed_forward=replace(one.feed_forward, **changes)) for one in plan.layers)
    return replace(plan, layers=fed)


class Drawn:
    """A `TensorSource` of drawn weights: norms near one, maps that keep the size of their inputs."""

    def __init__(self, seed: int = 0, spread: float = 1.0) -> None:
        self._seed, self._spread = seed, spread

    def __contains__(self, name: str) -> bool:
        return not is_beside_codes(name)

    def copy(self, name: str, into: torch.Tensor) -> int:
        generator = torch.Generator().manual_seed(self._seed + sum(name.encode()) * 31 + into.numel())
        drawn = torch.randn(into.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            drawn = 1 + 0.3 * drawn
        elif into.ndim > 1:
            drawn = drawn * self._spread * into.shape[-1] ** -0.5
        into.copy_(drawn)
        return into.nbytes

    def quantised(self, name: str, outputs: int, inputs: int) -> None:
        return None
