"""What stands around attention over latents (`plan.Latent`): queries are brought into the space of the latents,
and sums of latents out of it. So what is cached, and what attention reads, is one vector for each position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.plan import Attention
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """keys: [heads * rank, own], values: [heads * value, rank]; they are never quantised while loading. queries:
    what makes the queries of their normed `query_rank` numbers; None: the first product has made them."""

    keys: DenseLinear
    values: DenseLinear
    norm: NormWeights
    queries: Linear | None = None
    query_norm: NormWeights | None = None


def latent_heads(
    plan: Attention, weights: LatentWeights, given: Tensor, stored: Tensor, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """The parts of the first product -> queries [T, heads, head_dim], keys [T, 1, head_dim], not yet rotated."""
    latent = plan.latent
    assert latent is not None
    if weights.queries is not None:
        assert weights.query_norm is not None
        given = weights.queries(normed(latent.norm, weights.query_norm, given, kernels))
    turning = plan.head_dim - latent.rank
    own, q = given.view(len(given), plan.heads, -1).split([latent.own, turning], dim=-1)
    keys = weights.keys.weight.view(plan.heads, latent.rank, latent.own)
    met = torch.einsum("thn,hrn->thr", own, keys)
    low, k = stored.split([latent.rank, turning], dim=-1)
    low = normed(latent.norm, weights.norm, low, kernels)
    return torch.cat([q, met], dim=-1), torch.cat([k, low], dim=-1)[:, None]


def latent_outputs(plan: Attention, weights: LatentWeights, sums: Tensor) -> Tensor:
    """Weighted sums of keys, [T, heads * head_dim] -> [T, out_size]."""
    latent = plan.latent
    assert latent is not None
    sums = sums.view(len(sums), plan.heads, -1)[..., -latent.rank :]
    values = weights.values.weight.view(plan.heads, latent.value, latent.rank)
    return torch.einsum("thr,hvr->thv", sums, values).flatten(1)
