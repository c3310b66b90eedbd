"""Attention's weights, and what stands between its projections and a step's attention over the cache. Scores may
have a part by the distance of two positions, in texts that are computed whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, is_plain, normed, weight_of
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.plan import Attention, Disentangled, DistanceBias, Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear


class Distances(Protocol):
    """What is added to the scores of a layer."""

    def added(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """q, k: [..., heads, n, head_dim], all positions of a text -> [heads or ..., heads, n, n], in the type of
        q, to be added to scores after these were multiplied with `scale`."""
        ...


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
        distances: Distances | None = None,
    ) -> Tensor:
        """Rotate q [T, Hq, D] and k [T, Hkv, D], store k and v [T, Hkv, D] of the step's positions, and return the
        attention output [T, Hq * D]. q may be overwritten. k and v None: the layer reads those of another one. v
        alone None: values are the stored keys."""
        ...


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """keys: [heads * rank, own], values: [heads * value, rank]; they are never quantised while loading. queries:
    what makes the queries of their normed `query_rank` numbers; None: the first product has made them."""

    keys: DenseLinear
    values: DenseLinear
    norm: NormWeights
    queries: Linear | None = None
    query_norm: NormWeights | None = None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: the outputs for queries, keys and values one after the other (`plan.Attention.qkv_sizes`). sinks:
    [heads]. distances, latent: of a plan that has some."""

    qkv: Linear
    out: Linear
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    v_norm: NormWeights | None = None
    sinks: Tensor | None = None
    distances: Distances | None = None
    latent: LatentWeights | None = None

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
    """[T, queries, keys and values] -> [T, out_size], the inputs of the output projection. `qkv` may be
    overwritten."""
    n, gate = len(qkv), None
    neighbours = plan.rotary is not None and plan.rotary.neighbours
    q, *stored = torch.split(qkv, list(plan.qkv_sizes), dim=-1)
    if weights.latent is not None:
        q, keys = _latent_heads(plan, weights.latent, q, stored[0], kernels)
        sums = attention.attend(layer, q, keys, None, Rotation(None, 0.0, positions, table, neighbours))
        return _latent_outputs(plan, weights.latent, sums)
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
    rotation = Rotation(norms, eps, positions, table, neighbours)
    if weights.distances is not None:
        out = attention.attend(layer, q, k, v, rotation, weights.sinks, weights.distances)
    elif weights.sinks is None:
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


# ------------------------------------------------------------ latents
#
# Queries are brought into the space of the latents, and sums of latents out of it. So what is cached, and what
# attention reads, is one vector for each position.


def _latent_heads(
    plan: Attention, weights: LatentWeights, given: Tensor, stored: Tensor, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """The parts of the first product -> queries [T, heads, head_dim], keys [T, 1, head_dim], not yet rotated."""
    latent = plan.latent
    assert latent is not None
    if weights.queries is not None:
        assert weights.query_norm is not None
        given = weights.queries(normed(latent.norm, weights.query_norm, given, kernels))
    turning = plan.head_dim - latent.rank
    own, q = torch.split(given.view(len(given), plan.heads, -1), [latent.own, turning], dim=-1)
    keys = weights.keys.weight.view(plan.heads, latent.rank, latent.own)
    met = torch.einsum("thn,hrn->thr", own, keys)
    low, k = torch.split(stored, [latent.rank, turning], dim=-1)
    low = normed(latent.norm, weights.norm, low, kernels)
    return torch.cat([q, met], dim=-1), torch.cat([k, low], dim=-1)[:, None]


def _latent_outputs(plan: Attention, weights: LatentWeights, sums: Tensor) -> Tensor:
    """Weighted sums of keys, [T, heads * head_dim] -> [T, out_size]."""
    latent = plan.latent
    assert latent is not None
    sums = sums.view(len(sums), plan.heads, -1)[..., -latent.rank :]
    values = weights.values.weight.view(plan.heads, latent.value, latent.rank)
    return torch.einsum("thr,hvr->thv", sums, values).flatten(1)


# ------------------------------------------------------------ scores by distance


@dataclass(frozen=True, slots=True)
class BiasTable:
    """table: float32 [heads, 2 * positions - 1], of the distances -(positions - 1), ... from a query to a key."""

    table: Tensor

    def added(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        n, zero = q.shape[-2], self.table.shape[1] // 2
        # row i is [n - 1 - i : 2 n - 1 - i] of the distances -(n - 1) ... n - 1
        near = self.table[:, zero - (n - 1) : zero + n].to(q.dtype)
        return near.unfold(1, n, 1).flip(1)


@dataclass(frozen=True, slots=True)
class DistanceVectors:
    """keys, queries: [heads, vectors, head_dim], in the type of the model; None: they are not added. places: int64
    [2 * positions - 1], the vector of each distance from a key to a query, -(positions - 1) and up."""

    keys: Tensor | None
    queries: Tensor | None
    places: Tensor

    def added(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        n, zero = q.shape[-2], len(self.places) // 2
        near = self.places[zero - (n - 1) : zero + n]
        of_query = near.flip(0).unfold(0, n, 1).flip(0)  # [query, key]: of query - key
        found = torch.zeros((), dtype=q.dtype, device=q.device)
        if self.keys is not None:
            scores = q @ self.keys.transpose(-1, -2)
            found = found + scores.gather(-1, of_query.expand(*scores.shape[:-1], n))
        if self.queries is not None:
            scores = k @ self.queries.transpose(-1, -2)
            found = found + scores.gather(-1, of_query.t().expand(*scores.shape[:-1], n)).transpose(-1, -2)
        return found * scale


def bias_table(plan: DistanceBias, stored: Tensor, positions: int) -> BiasTable:
    """stored: [buckets, heads]."""
    distances = torch.arange(-(positions - 1), positions, device=stored.device)
    return BiasTable(stored.float()[_bucket(plan, distances)].t().contiguous())


def _bucket(plan: DistanceBias, distances: Tensor) -> Tensor:
    """As in T5 and MPNet, in whose code a distance is from the query to the key."""
    half = plan.buckets // 2
    exact, far = half // 2, distances.abs()
    ranges = torch.log(far.clamp(min=1).float() / exact) / math.log(plan.farthest / exact) * (half - exact)
    longer = (exact + ranges.to(torch.int64)).clamp(max=half - 1)
    return torch.where(far < exact, far, longer) + half * (distances > 0)


def vector_places(plan: Disentangled, positions: int, device: torch.device) -> Tensor:
    """int64 [2 * positions - 1]: the stored vector of each distance -(positions - 1) and up, as in DeBERTa."""
    distances = torch.arange(-(positions - 1), positions, device=device)
    if plan.buckets:
        half, far = plan.buckets // 2, distances.abs()
        inner = far.clamp(min=max(half - 1, 1)).float()
        stretch = torch.log(torch.tensor((plan.span - 1) / half))
        longer = torch.ceil(torch.log(inner / half) / stretch * (half - 1)) + half
        distances = torch.where(far <= half, distances, (longer * distances.sign()).to(torch.int64))
    each = plan.vectors // 2
    return (distances + each).clamp(0, 2 * each - 1)
