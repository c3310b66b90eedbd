"""A decoder of bins around any other."""

from __future__ import annotations

import torch

from petiole.gpu_worker.request.values import ValueTokens

STEP = 1 / 1024


class WithValues:
    """Adds the values of the bins that it is fed to what it embeds, and decodes bins from its hidden states."""

    value_tokens = ValueTokens(5, 6, *(tuple(k * STEP for k in range(1024)),) * 2)

    def __init__(self, decoder):
        self._decoder = decoder
        shape, noise = (2, decoder.plan.hidden_size), torch.Generator().manual_seed(0)
        self._inward, self._outward = (torch.randn(shape, generator=noise).to(decoder.device) for _ in range(2))

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def embed_coordinates(self, bins):
        return self._embed(self.value_tokens.coordinate_id, bins[:, None])

    def embed_sizes(self, bins):
        return self._embed(self.value_tokens.size_id, bins)

    def _embed(self, token_id, bins):
        values = (bins * STEP) @ self._inward[: bins.shape[1]]
        return self._decoder.embedding[token_id] + values.to(self._decoder.dtype)

    def coordinate_bins(self, hidden):
        return self.size_bins(hidden)[:, 0]

    def size_bins(self, hidden):
        hidden = hidden.float()
        return (512 + 511 * torch.tanh(hidden / hidden.norm(dim=-1, keepdim=True) @ self._outward.T)).int()
