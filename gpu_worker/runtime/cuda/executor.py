"""The CUDA executor: captured graphs for decode and verify steps, one eager causal pass for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from petiole.gpu_worker.config import Batching, EngineConfig
from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.decoder import Decoder, Forward, ValueDecoder
from petiole.gpu_worker.models.lora import AdapterBank
from petiole.gpu_worker.request.values import NO_BIN
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    HEAD_SIZES,
    WORKSPACE_BYTES,
    AppendWrappers,
    FlashInferAttention,
    Geometry,
    batch_ladder,
    host_page_counts,
    new_workspace,
)
from petiole.gpu_worker.runtime.cuda.attention.installed import require_version
from petiole.gpu_worker.runtime.cuda.graphs import Capture, DecodeGraphs, new_decode_buffers
from petiole.gpu_worker.runtime.device.interface import Device, DeviceStream, staged, upload
from petiole.gpu_worker.runtime.interface import NO_UPDATES, StepBatch, StepKind
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.memory.room import state_bytes
from petiole.gpu_worker.runtime.step.deltas import GroupedDeltas
from petiole.gpu_worker.runtime.step.inputs import ImageInputs, StepInputs, StepStates, lay_out
from petiole.gpu_worker.runtime.step.sampling import Choice, likeliest

_WRAPPER_BYTES = 8 * 2**20
_SLACK_BYTES = 512 * 2**20

WORKING_PART = 0.25
"""The part of the memory left by the weights that the default numbers of sequences and of tokens may take."""


def require_flashinfer(model: ModelConfig) -> None:
    """Raises ModelError if FlashInfer is missing or of another version than needed, or if its kernels would
    silently compute this model wrongly."""
    require_version()
    if model.head_dim not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        raise ModelError(f"head_dim: must be {known} on CUDA, got {model.head_dim}")


def working_bytes(engine: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """Bytes needed beside weights, adapters and KV: workspaces, graphs, prefill activations, logits and the rows'
    sampling states."""
    ladder = batch_ladder(engine.graph_batch_sizes, engine.max_num_seqs)
    outputs = engine.max_num_seqs * (1 + engine.speculative_tokens)
    tokens = max(engine.max_num_batched_tokens, outputs)
    if engine.prefill_policy == "mixed":
        tokens = max(tokens, engine.chunk_size + outputs)
    widest = 3 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate_size
    logits = 4 * model.vocab_size * (6 * outputs + 2 * ladder[-1])
    kinds = 1 + (engine.speculative_tokens > 0)  # decode, verify
    wrappers = 2 * (kinds * len(ladder) + 1) * len(set(model.windows)) * _WRAPPER_BYTES
    columns = -(-(engine.max_model_len or model.max_position) // engine.page_size)
    page_lists = 4 * (2 * ladder[-1] + engine.max_num_seqs + 1) * columns  # each slot's, and the table
    states = (engine.max_num_seqs + 1) * state_bytes(model)
    return WORKSPACE_BYTES + wrappers + page_lists + tokens * widest * itemsize + logits + states + _SLACK_BYTES


def batching_that_fits(
    config: EngineConfig, defaults: Batching, model: ModelConfig, itemsize: int, free: int
) -> EngineConfig:
    """The configuration with these defaults, half of them, or a quarter of them in place of 0: the first whose
    working memory is at most `WORKING_PART` of the free bytes. The rest is for the KV cache, without which no
    sequence runs."""
    *larger, smallest = (config.decided(defaults.divided(by)) for by in (1, 2, 4))
    fits = (one for one in larger if working_bytes(one, model, itemsize) <= free * WORKING_PART)
    return next(fits, smallest)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot's graphs by kind of step, and the attention wrappers of its other steps."""

    graphs: dict[StepKind, DecodeGraphs]
    append: AppendWrappers


def choose(logits: Tensor, choice: Choice | None) -> Tensor:
    """`sampling.choose` in two launches."""
    if choice is None:
        return likeliest(logits)
    from petiole.gpu_worker.runtime.cuda.fused.choose import choose as choose_in_one_launch

    return choose_in_one_launch(logits, choice)


class CudaExecutor:
    """Forward and logits on CUDA. See `runtime.Executor`."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        bank: AdapterBank | None,
        pending: Tensor,
        pending_bins: Tensor,
        config: EngineConfig,
        device: Device,
        stream: DeviceStream,
        capture: Capture,
    ) -> None:
        self._decoder, self._cache, self._bank = decoder, cache, bank
        self._pending, self._pending_bins = pending, pending_bins
        self._geometry = Geometry(decoder.config, cache, decoder.dtype)
        sizes = batch_ladder(config.graph_batch_sizes, config.max_num_seqs)
        workspace = new_workspace(cache.keys.device)
        self._slots = [self._new_slot(sizes, 1 + config.speculative_tokens, workspace, device) for _ in range(2)]
        device.synchronize()  # these tensors were created on another stream than the one that uses them
        self.fused: dict[int, bool] = {}
        for slot in self._slots:
            for graphs in slot.graphs.values():
                graphs.capture(stream, capture, self.fused)
        stream.enqueue(self._warm_up)
        stream.synchronize()

    def _new_slot(self, sizes: list[int], queries: int, workspace: Tensor, device: Device) -> _Slot:
        model = (self._decoder, self._geometry, self._pending, self._pending_bins, self._bank)
        buffers = new_decode_buffers(sizes[-1], queries, self._decoder, self._geometry, device)
        graphs: dict[StepKind, DecodeGraphs] = {"decode": DecodeGraphs(*model, sizes, workspace, buffers)}
        if 1 < queries <= self._cache.table.shape[1] * self._cache.page_size:
            graphs["verify"] = DecodeGraphs(*model, sizes, workspace, buffers, queries)
        return _Slot(graphs, AppendWrappers(self._geometry, workspace))

    def forward(self, slot_id: int, inputs: StepInputs, images: ImageInputs = ()) -> StepStates:
        assert not images, "no model with images is loaded on CUDA"
        slot = self._slots[slot_id]
        graphs = slot.graphs.get(inputs.kind)
        if graphs is not None and graphs.fits(inputs):
            return graphs.run(inputs)
        self._cache.update(inputs.pages)
        return self._append(slot.append, inputs)

    def _warm_up(self) -> None:
        """Compile and load the kernels outside the graphs, on row 0: an eager step, sampling with all filters."""
        one = np.ones(1, dtype=np.int32)
        batch = StepBatch("prefill", 0 * one, 0 * one, 2 * one, np.zeros(2, np.int32), one, -one, (), NO_UPDATES)
        with torch.inference_mode():
            for slot in self._slots:
                logits = self._append(slot.append, lay_out(batch, 0 * one)).logits()
            keys, half = self._up(np.zeros((1, 2), np.int32)), self._up(np.full(1, 0.5, np.float32))
            for found in dict.fromkeys((logits, logits.float())):  # as they are, and after penalties, say
                choose(found, Choice(half, keys, self._up(one.astype(np.int64)), half, half))

    def _append(self, wrappers: AppendWrappers, inputs: StepInputs) -> StepStates:
        rows, positions = self._up(inputs.rows), self._up(inputs.positions.astype(np.int32))
        attention = self._plan(wrappers, inputs, rows, positions)
        deltas = None
        if self._bank is not None and inputs.adapters.any():
            deltas = GroupedDeltas(self._bank, np.repeat(inputs.adapters, inputs.lengths))
        hidden = self._decoder.forward(self._embed(inputs, rows), Forward(positions, attention, deltas))
        outputs = hidden[self._up(inputs.output_inputs)]
        return StepStates(outputs, lambda: self._decoder.head_output(outputs))

    def _embed(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        given = self._up(inputs.token_ids)
        token_ids = torch.where(given < 0, self._pending[rows], given)
        if self._decoder.value_tokens is None:
            return self._decoder.embed(token_ids)
        bins = self._pending_bins[rows]
        known = torch.full_like(bins, NO_BIN) if inputs.bins is None else self._up(inputs.bins)
        bins = torch.where((given < 0)[:, None], bins, known)
        return cast(ValueDecoder, self._decoder).embed_bins(token_ids, bins)

    def _plan(
        self, wrappers: AppendWrappers, inputs: StepInputs, rows: Tensor, positions: Tensor
    ) -> FlashInferAttention:
        from petiole.gpu_worker.runtime.cuda.fused.layers import gather_pages, token_slots

        size, table = len(inputs.batch_rows), self._cache.table
        indptr, last = host_page_counts(inputs.starts + inputs.lengths, self._cache.page_size)
        lengths = np.zeros(size + 1, dtype=np.int32)
        np.cumsum(inputs.lengths, out=lengths[1:])
        indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=table.device)
        gather_pages(table, self._up(inputs.batch_rows.astype(np.int32)), self._up(indptr), indices)
        on_host = [staged(array, table.device) for array in (lengths, indptr, last)]
        wrappers.plan(on_host[0], on_host[1], indices, on_host[2])
        slots = token_slots(table, rows, positions, self._cache.page_size)
        return FlashInferAttention(self._geometry, slots, wrappers.wrappers)

    def _up(self, array: np.ndarray) -> Tensor:
        return upload(array, self._cache.keys.device)
