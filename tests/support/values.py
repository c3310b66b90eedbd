"""A decoder of values around any other."""

from __future__ import annotations

import torch


class WithValues:
    """Adds the values that it is fed to what it embeds, and decodes them from its hidden states."""

    n_values = 2

    def __init__(self, decoder):
        self._decoder = decoder
        shape, noise = (2, decoder.config.hidden_size), torch.Generator().manual_seed(0)
        self._inward, self._outward = (torch.randn(shape, generator=noise).to(decoder.device) for _ in range(2))

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def embed_values(self, token_ids, values):
        return self._decoder.embed(token_ids) + (values @ self._inward).to(self._decoder.dtype)

    def decode_values(self, hidden, token_ids):
        hidden = hidden.float()
        return torch.tanh(hidden / hidden.norm(dim=-1, keepdim=True) @ self._outward.T)
