"""The gated delta rule: a matrix S for each head, which stores values under keys.

    S *= exp(g)                          what is stored fades
    S += k (x) beta * (v - k.S)          what is stored under k moves towards v
    o = q.S

A single position is computed so. Several are computed in chunks, with products of matrices. Inside a chunk, with G
the sum of g up to a position, u its change of S and S0 the matrix before the chunk:

    u_i = beta_i * (v_i - exp(G_i) k_i.S0 - sum over j < i of exp(G_i - G_j) (k_i.k_j) u_j)
    o_i = exp(G_i) q_i.S0 + sum over j <= i of exp(G_i - G_j) (q_i.k_j) u_j

The first line is a triangular system. Both ways differ in the order of their sums, so in the last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.scan import CHUNK, decay


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: [n, positions, heads, key_dim]; v: [n, positions, heads, value_dim]; g, beta: [n, positions, heads];
    stored: S [n, heads, key_dim, value_dim]; all float32. Returns the outputs, like v, and the new S."""
    if q.shape[1] == 1:
        outputs, stored = _one(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], stored)
        return outputs.unsqueeze(1), stored
    outputs = torch.empty_like(v)
    for start in range(0, q.shape[1], CHUNK):
        cut = slice(start, start + CHUNK)
        q_, k_, v_, g_, beta_ = (x[:, cut].transpose(1, 2) for x in (q, k, v, g, beta))
        of_chunk, stored = _chunk(q_, k_, v_, g_, beta_, stored)
        outputs[:, cut] = of_chunk.transpose(1, 2)
    return outputs, stored


def _one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """One position of each of n rows: all without the dimension of positions."""
    faded = stored * g.exp()[..., None, None]
    change = beta[..., None] * (v - torch.matmul(k.unsqueeze(-2), faded).squeeze(-2))
    new = faded + k[..., :, None] * change[..., None, :]
    return torch.matmul(q.unsqueeze(-2), new).squeeze(-2), new


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """All with the dimension of positions after that of heads."""
    kept, fading, left = decay(g)
    keys = k.transpose(-1, -2)
    earlier = (beta[..., None] * torch.matmul(k, keys) * fading).tril(-1)
    wanted = beta[..., None] * (v - kept * torch.matmul(k, stored))
    change = torch.linalg.solve_triangular(earlier, wanted, upper=False, unitriangular=True)
    outputs = kept * torch.matmul(q, stored) + torch.matmul(torch.matmul(q, keys) * fading, change)
    return outputs, kept[..., -1:, :] * stored + torch.matmul((k * left).transpose(-1, -2), change)
