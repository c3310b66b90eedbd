"""The CPU executor: native code over the paged KV cache where available, otherwise torch."""

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

_NO_HIDDEN = torch.empty(0)


class CpuExecutor:
    """Forward and logits of one decoder over one KV pool. See `runtime.Executor`.

    Models that decode values use the torch path, which the native code does not support.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, bank: AdapterBank | None, pending: Tensor, pending_values: Tensor
    ) -> None:
        self._decoder, self._cache, self._bank = decoder, cache, bank
        self._pending, self._pending_values = pending.numpy(), pending_values.numpy()
        self._native = None if decoder.n_values else native_decoder(decoder, cache, bank)

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        self._cache.update(inputs.pages)
        at = inputs.pending_inputs
        inputs.token_ids[at] = self._pending[inputs.rows[at]]
        token_ids, outputs = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.output_inputs)
        rows, positions = torch.from_numpy(inputs.rows), torch.from_numpy(inputs.positions)
        adapters = None
        if self._bank is not None and inputs.adapters.any():
            adapters = np.repeat(inputs.adapters, inputs.lengths)
        if self._native is not None:
            logits = self._native.forward(slot_id, token_ids, positions, rows, outputs, adapters)
            return StepStates(_NO_HIDDEN, lambda: logits)
        attention = PagedAttention(
            cache=self._cache,
            windows=self._decoder.config.windows,
            rows=torch.from_numpy(inputs.batch_rows),
            starts=inputs.starts,
            lengths=inputs.lengths,
            slots=self._cache.slots(rows, positions),
            scale=self._decoder.config.head_dim**-0.5,
        )
        deltas = None if self._bank is None or adapters is None else GroupedDeltas(self._bank, adapters)
        forward = Forward(positions, attention, deltas)
        hidden = self._decoder.forward(self._embed(inputs, token_ids), forward)[outputs]
        return StepStates(hidden, lambda: self._decoder.head_output(hidden).float())

    def _embed(self, inputs: StepInputs, token_ids: Tensor) -> Tensor:
        if not self._decoder.n_values:
            return self._decoder.embed(token_ids)
        values, at = inputs.values, inputs.pending_inputs
        if values is None:
            values = np.zeros((len(token_ids), self._decoder.n_values), np.float32)
        values[at] = self._pending_values[inputs.rows[at]]
        return cast(ValueDecoder, self._decoder).embed_values(token_ids, torch.from_numpy(values))
