"""Attention's weights, and what stands between its projections and a step's attention over the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, is_plain, normed, weight_of
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.plan import Attention, Norm
from petiole.gpu_worker.models.weights.linear import Linear


class StepAttention(Protocol):
    """One step's attention over the paged KV cache."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rotate q [T, Hq, D] and k [T, Hkv, D], store k and v [T, Hkv, D] of the step's positions, and return the
        attention output [T, Hq * D]. q may be overwritten. k and v None: the layer reads those of another one."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: the outputs for queries, keys and values one after the other (`plan.Attention.qkv_sizes`). sinks:
    [heads]."""

    qkv: Linear
    out: Linear
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    v_norm: NormWeights | None = None
    sinks: Tensor | None = None

    @property
    def first(self) -> Linear:
        """The product of the layer's inputs."""
        return self.qkv


def attended(
    plan: Attention,
    weights: AttentionWeights,
    layer: int,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor | None,
    attention: StepAttention,
    kernels: Kernels,
) -> Tensor:
    """[T, queries, keys and values] -> [T, q_size], the inputs of the output projection. `qkv` may be
    overwritten."""
    n, gate = len(qkv), None
    q, *stored = torch.split(qkv, list(plan.qkv_sizes), dim=-1)
    q = q.view(n, plan.heads, -1)
    if plan.output_gate:
        q, gate = (half.contiguous() for half in q.chunk(2, dim=-1))
    k = v = None
    if stored:
        k, v = (x.view(n, plan.kv_heads, plan.head_dim) for x in (stored[0], stored[-1]))
        if plan.v_norm is not None:
            v = normed(plan.v_norm, weights.v_norm or NormWeights(), v, kernels)
    norms, eps = None, 0.0
    if _norms_with_the_rotation(plan, weights):
        norms, eps = (
            (weight_of(weights.q_norm), weight_of(weights.k_norm)),
            plan.q_norm.eps if plan.q_norm else 0.0,
        )
    else:
        q = _normed(plan.q_norm, weights.q_norm, q, plan, kernels)
        k = None if k is None else _normed(plan.k_norm, weights.k_norm, k, plan, kernels)
    if (growth := plan.query_growth) is not None:
        grown = 1 + growth.beta * torch.log1p(torch.floor(positions / growth.length))
        q = (q * grown[:, None, None]).to(q.dtype)
    rotation = Rotation(norms, eps, positions, table)
    if weights.sinks is None:
        out = attention.attend(layer, q, k, v, rotation)
    else:
        out = attention.attend(layer, q, k, v, rotation, weights.sinks)
    return out if gate is None else out * torch.sigmoid(gate).view(n, -1)


def _norms_with_the_rotation(plan: Attention, weights: AttentionWeights) -> bool:
    """Whether kernels apply both norms where they rotate."""
    plain = is_plain(plan.q_norm, weights.q_norm) and is_plain(plan.k_norm, weights.k_norm)
    alone = plan.norm_whole or plan.query_growth is not None or plan.keys_of is not None
    return plain and not alone and plan.q_norm is not None and plan.q_norm == plan.k_norm


def _normed(
    norm: Norm | None, weights: NormWeights | None, x: Tensor, plan: Attention, kernels: Kernels
) -> Tensor:
    if norm is None:
        return x
    weights = weights or NormWeights()
    if plan.norm_whole:
        return normed(norm, weights, x.reshape(len(x), -1), kernels).view(x.shape)
    return normed(norm, weights, x, kernels)
