"""How a CUDA device computes a step: a captured graph for decode, one eager causal pass for everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.config import EngineConfig
from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Decoder, Forward
from gpu_worker.models.lora import AdapterBank, GroupedDeltas
from gpu_worker.runtime.attention.flashinfer import (
    WORKSPACE_BYTES,
    AppendWrappers,
    FlashInferAttention,
    Geometry,
    Placement,
    batch_ladder,
    gather_pages,
    host_page_counts,
    new_workspace,
)
from gpu_worker.runtime.device import Device, Stream
from gpu_worker.runtime.graphs import Capture, DecodeGraphs
from gpu_worker.runtime.inputs import StepInputs
from gpu_worker.runtime.kv import KVCache

_WRAPPER_BYTES = 8 * 2**20
_SLACK_BYTES = 512 * 2**20


def require_flashinfer() -> None:
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        raise ModelError(f"the CUDA path needs FlashInfer (pip install petiole[gpu]): {error}") from None


def working_bytes(engine: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """What a running engine needs beside weights and KV: workspaces, graphs, a prefill's activations, logits."""
    ladder = batch_ladder(engine.graph_batch_sizes, engine.max_num_seqs)
    outputs = engine.max_num_seqs * (1 + engine.speculative_tokens)
    tokens = max(engine.max_num_batched_tokens, outputs)
    widest = 3 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate_size
    logits = 4 * model.vocab_size * (6 * outputs + 2 * ladder[-1])
    wrappers = 2 * (len(ladder) + 2) * len(set(model.windows)) * _WRAPPER_BYTES
    return WORKSPACE_BYTES + wrappers + tokens * widest * itemsize + logits + _SLACK_BYTES


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot's captured decodes, and wrappers for its prefill and its verify, which may be in flight together."""

    graphs: DecodeGraphs
    append: dict[str, AppendWrappers]


class CudaExecutor:
    """Forward and logits on CUDA. See `runtime.Executor`."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        bank: AdapterBank | None,
        pending: Tensor,
        config: EngineConfig,
        device: Device,
        stream: Stream,
        capture: Capture,
    ) -> None:
        self._decoder, self._cache, self._bank, self._pending = decoder, cache, bank, pending
        self._geometry = Geometry(decoder.config, cache, decoder.dtype)
        sizes = batch_ladder(config.graph_batch_sizes, config.max_num_seqs)
        workspace = new_workspace(cache.keys.device)
        self._device = device
        self._slots = [self._new_slot(sizes, workspace) for _ in range(2)]
        for slot in self._slots:
            slot.graphs.capture(stream, capture)

    def _new_slot(self, sizes: list[int], workspace: Tensor) -> _Slot:
        model = (self._decoder, self._geometry, self._pending, self._bank)
        graphs = DecodeGraphs(*model, sizes, workspace, self._device)
        kinds = ("prefill", "other")
        return _Slot(graphs, {kind: AppendWrappers(self._geometry, workspace) for kind in kinds})

    def forward(self, slot_id: int, inputs: StepInputs) -> Callable[[], Tensor]:
        slot = self._slots[slot_id]
        if inputs.kind == "decode" and len(inputs.batch_rows) <= slot.graphs.largest:
            return slot.graphs.run(inputs)
        return self._append(slot.append["prefill" if inputs.kind == "prefill" else "other"], inputs)

    def _append(self, wrappers: AppendWrappers, inputs: StepInputs) -> Callable[[], Tensor]:
        rows, positions = self._up(inputs.rows), self._up(inputs.positions.astype(np.int32))
        token_ids = self._up(inputs.token_ids)
        token_ids = torch.where(token_ids < 0, self._pending[rows], token_ids)
        attention = self._plan(wrappers, inputs, positions)
        deltas = None
        if self._bank is not None and inputs.adapters.any():
            deltas = GroupedDeltas(self._bank, np.repeat(inputs.adapters, inputs.lengths))
        hidden = self._decoder.forward(self._decoder.embed(token_ids), Forward(positions, attention, deltas))
        outputs = hidden[self._up(inputs.output_inputs)]
        return lambda: self._decoder.head_output(outputs).float()

    def _plan(self, wrappers: AppendWrappers, inputs: StepInputs, positions: Tensor) -> FlashInferAttention:
        size = len(inputs.batch_rows)
        indptr, last = host_page_counts(inputs.starts + inputs.lengths, self._cache.page_size)
        lengths = np.zeros(size + 1, dtype=np.int32)
        np.cumsum(inputs.lengths, out=lengths[1:])
        owners = self._up(np.repeat(np.arange(size, dtype=np.int32), inputs.lengths))
        on_device = self._up(indptr)
        indices = gather_pages(self._cache, self._up(inputs.batch_rows), on_device, int(indptr[-1]))
        pinned = [self._pin(array) for array in (lengths, indptr, last)]
        wrappers.plan(pinned[0], pinned[1], indices, pinned[2])
        placement = Placement(owners, positions, indices, on_device, self._up(last))
        return FlashInferAttention(self._geometry, placement, wrappers.wrappers)

    def _up(self, array: np.ndarray) -> Tensor:
        return self._pin(array).to(self._cache.keys.device, non_blocking=True)

    def _pin(self, array: np.ndarray) -> Tensor:
        """Pinned memory of torch's pool, which keeps it until copies out of it are done."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if self._device.kind == "cuda" else tensor
