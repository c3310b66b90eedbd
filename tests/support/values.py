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
        shape, noise = (2, decoder.config.hidden_size), torch.Generator().manual_seed(0)
        self._inward, self._outward = (torch.randn(shape, generator=noise).to(decoder.device) for _ in range(2))

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def embed_bins(self, token_ids, bins):
        values = bins.clamp(min=0) * STEP
        return self._decoder.embed(token_ids) + (values @ self._inward).to(self._decoder.dtype)

    def decode_bins(self, hidden, token_ids):
        hidden = hidden.float()
        return (512 + 511 * torch.tanh(hidden / hidden.norm(dim=-1, keepdim=True) @ self._outward.T)).int()
