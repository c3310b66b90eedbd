"""The scan of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024): a matrix S for each head, to which values are
added under keys.

    S = exp(g) * S + k (x) v             what is stored fades
    o = q.S

A single position is computed so. Several are computed in chunks, with products of matrices. Inside a chunk, with G
the sum of g up to a position and S0 the matrix before the chunk:

    o_i = exp(G_i) q_i.S0 + sum over j <= i of exp(G_i - G_j) (q_i.k_j) v_j

Both ways differ in the order of their sums, so in the last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: [n, positions, groups, state], each for heads / groups consecutive heads; v: [n, positions, heads,
    width]; g: [n, positions, heads], at most 0; stored: S [n, heads, state, width]; all float32. Returns the
    outputs, like v, and the new S."""
    each = v.shape[2] // q.shape[2]
    if q.shape[1] == 1:
        q_, k_ = (x[:, 0].repeat_interleave(each, dim=1) for x in (q, k))
        stored = stored * g[:, 0, :, None, None].exp() + k_[..., :, None] * v[:, 0, :, None, :]
        return torch.matmul(q_.unsqueeze(-2), stored).transpose(1, 2), stored
    outputs = torch.empty_like(v)
    for start in range(0, q.shape[1], CHUNK):
        cut = slice(start, start + CHUNK)
        q_, k_, v_, g_ = (x[:, cut].transpose(1, 2) for x in (q, k, v, g))
        of_chunk, stored = _chunk(q_, k_, v_, g_, stored, each)
        outputs[:, cut] = of_chunk.transpose(1, 2)
    return outputs, stored


def decay(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g: [..., positions]. How much is kept of S0 at each position, of what each position has stored at each later
    one, and of the latter after the chunk."""
    total = g.cumsum(-1)
    fading = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    return total.exp()[..., None], fading, (total[..., -1:] - total).exp()[..., None]


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, stored: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """All with the dimension of positions after that of heads or groups."""
    kept, fading, left = decay(g)
    shares = torch.matmul(q, k.transpose(-1, -2)).repeat_interleave(each, dim=1) * fading
    q, k = (x.repeat_interleave(each, dim=1) for x in (q, k))
    outputs = kept * torch.matmul(q, stored) + torch.matmul(shares, v)
    return outputs, kept[..., -1:, :] * stored + torch.matmul((k * left).transpose(-1, -2), v)
