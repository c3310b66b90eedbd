"""How a CPU computes a step: compiled code over the paged cache where there is some, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoder import Decoder, Forward
from gpu_worker.models.lora import AdapterBank, GroupedDeltas
from gpu_worker.runtime.attention.paged import PagedAttention
from gpu_worker.runtime.inputs import StepInputs
from gpu_worker.runtime.kv import KVCache
from gpu_worker.runtime.native.forward import native_decoder


class CpuExecutor:
    """Forward and logits of one decoder over one KV pool. See `runtime.Executor`.

    Steps with adapters take the torch path: the compiled one knows none.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, bank: AdapterBank | None, pending: Tensor) -> None:
        self._decoder, self._cache, self._bank, self._pending = decoder, cache, bank, pending
        self._native = native_decoder(decoder, cache)

    def forward(self, slot_id: int, inputs: StepInputs) -> Callable[[], Tensor]:
        token_ids = torch.from_numpy(inputs.token_ids)
        if len(inputs.pending_inputs):
            rows = torch.from_numpy(inputs.rows[inputs.pending_inputs])
            token_ids[torch.from_numpy(inputs.pending_inputs)] = self._pending[rows]
        hidden = self._hidden(inputs, token_ids)
        outputs = hidden if inputs.samples_all else hidden[torch.from_numpy(inputs.output_inputs)]
        return lambda: self._logits(outputs)

    def _hidden(self, inputs: StepInputs, token_ids: Tensor) -> Tensor:
        rows, positions = torch.from_numpy(inputs.rows), torch.from_numpy(inputs.positions)
        adapted = self._bank is not None and bool(inputs.adapters.any())
        if self._native is not None and not adapted:
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
        deltas = None
        if self._bank is not None and adapted:
            deltas = GroupedDeltas(self._bank, np.repeat(inputs.adapters, inputs.lengths))
        return self._decoder.forward(self._decoder.embed(token_ids), Forward(positions, attention, deltas))

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.logits(hidden.float())
        return self._decoder.head_output(hidden).float()
