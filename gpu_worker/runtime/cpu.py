"""How a CPU computes a step: compiled code over the paged cache where there is some, plain torch elsewhere."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoder import Decoder, Forward, ValueDecoder
from gpu_worker.models.lora import AdapterBank, GroupedDeltas
from gpu_worker.runtime.attention.paged import PagedAttention
from gpu_worker.runtime.inputs import StepInputs, StepStates
from gpu_worker.runtime.kv import KVCache
from gpu_worker.runtime.native.forward import native_decoder


class CpuExecutor:
    """Forward and logits of one decoder over one KV pool. See `runtime.Executor`.

    Models that decode values take the torch path: the compiled one knows none.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, bank: AdapterBank | None, pending: Tensor, pending_values: Tensor
    ) -> None:
        self._decoder, self._cache, self._bank = decoder, cache, bank
        self._pending, self._pending_values = pending.numpy(), pending_values.numpy()
        self._native = None if decoder.n_values else native_decoder(decoder, cache, bank)

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        at = inputs.pending_inputs
        inputs.token_ids[at] = self._pending[inputs.rows[at]]
        hidden = self._hidden(inputs, torch.from_numpy(inputs.token_ids))
        outputs = hidden if inputs.samples_all else hidden[torch.from_numpy(inputs.output_inputs)]
        return StepStates(outputs, lambda: self._logits(outputs))

    def _embed(self, inputs: StepInputs, token_ids: Tensor) -> Tensor:
        if not self._decoder.n_values:
            return self._decoder.embed(token_ids)
        values, at = inputs.values, inputs.pending_inputs
        if values is None:
            values = np.zeros((len(token_ids), self._decoder.n_values), np.float32)
        values[at] = self._pending_values[inputs.rows[at]]
        return cast(ValueDecoder, self._decoder).embed_values(token_ids, torch.from_numpy(values))

    def _hidden(self, inputs: StepInputs, token_ids: Tensor) -> Tensor:
        rows, positions = torch.from_numpy(inputs.rows), torch.from_numpy(inputs.positions)
        adapted = self._bank is not None and bool(inputs.adapters.any())
        if self._native is not None:
            adapters = np.repeat(inputs.adapters, inputs.lengths) if adapted else None
            return self._native.forward(self._native.embed(token_ids), positions, rows, adapters)
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
        return self._decoder.forward(self._embed(inputs, token_ids), Forward(positions, attention, deltas))

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.logits(hidden.float())
        return self._decoder.head_output(hidden).float()
