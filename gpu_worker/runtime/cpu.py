"""How a CPU computes a step: compiled code over the paged cache where there is some, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.models.decoder import Decoder, Forward, LinearDeltas
from gpu_worker.runtime.attention.paged import PagedAttention
from gpu_worker.runtime.inputs import StepInputs
from gpu_worker.runtime.kv import KVCache
from gpu_worker.runtime.native.forward import native_decoder


class CpuExecutor:
    """Forward and logits of one decoder over one KV pool. See `runtime.Executor`."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._native = native_decoder(decoder, cache)

    def forward(self, inputs: StepInputs, token_ids: Tensor, deltas: LinearDeltas | None) -> Tensor:
        rows, positions = torch.from_numpy(inputs.rows), torch.from_numpy(inputs.positions)
        if self._native is not None and deltas is None:
            return self._native.forward(self._native.embed(token_ids), positions, rows)
        attention = PagedAttention(
            cache=self._cache,
            windows=self._decoder.config.windows,
            rows=torch.from_numpy(inputs.batch_rows),
            starts=inputs.starts,
            lengths=inputs.lengths,
            slots=self._cache.slots(rows, positions),
            scale=self._decoder.config.head_dim**-0.5,
        )
        return self._decoder.forward(self._decoder.embed(token_ids), Forward(positions, attention, deltas))

    def logits(self, hidden: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.logits(hidden.float())
        return self._decoder.logits(hidden)
