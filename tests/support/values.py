"""A decoder with values around any other."""

from __future__ import annotations

import numpy as np
import torch

from petiole.gpu_worker.models.moondream.values import SIZE, value_kinds

STEP = 1 / 1024
OWN = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]], bool)
"""The numbers of a line that belong to a coordinate, to a size and to text."""


class WithValues:
    """Adds the values that it is fed to what it embeds, and makes numbers from its hidden states."""

    value_tokens = value_kinds(5, 6, *(tuple(k * STEP for k in range(1024)),) * 2)

    def __init__(self, decoder):
        self._decoder = decoder
        shape, noise = (2, decoder.plan.hidden_size), torch.Generator().manual_seed(0)
        self._inward, self._outward = (torch.randn(shape, generator=noise).to(decoder.device) for _ in range(2))

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def embed_value(self, kind, numbers):
        token_id = next(one.token_id for one in self.value_tokens.kinds if one.name == kind)
        values = (numbers * STEP) @ self._inward[: numbers.shape[1]]
        return self._decoder.embedding[token_id] + values.to(self._decoder.dtype)

    def made_value(self, kind, hidden):
        hidden = hidden.float()
        made = (512 + 511 * torch.tanh(hidden / hidden.norm(dim=-1, keepdim=True) @ self._outward.T)).int()
        return made if kind == SIZE else made[:, :1]
