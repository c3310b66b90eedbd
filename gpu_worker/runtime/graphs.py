"""Decode steps as CUDA graphs: one per slot and batch size of a ladder, captured once.

A graph reads rows, positions, tokens and new entries of the page table from the slot's device buffer, and pending
inputs and the page table at their fixed addresses. It writes those entries, the list of the batch's pages, and
logits (and hidden states, for models that decode values) to the slot's buffers. The attention plan, which changes
between replays, is written to the same memory before each replay. A batch between two sizes is padded with row 0,
whose one position lies in page 0.

A small batch is captured twice, with the usual kernels and with `fused.products`, and the quicker graph is kept:
on another card, or for another shape, it may be the other one.

All graphs share one memory pool. This is safe because they run one after another on one stream, and outputs that
outlive a replay are copied out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.models.decoder import Decoder, Forward, ValueDecoder
from gpu_worker.models.lora import AdapterBank, CapturedDeltas
from gpu_worker.runtime.attention.flashinfer import (
    DecodeWrappers,
    FlashInferAttention,
    Geometry,
    host_page_counts,
)
from gpu_worker.runtime.cuda_device import CudaStream
from gpu_worker.runtime.device import Device, Stream
from gpu_worker.runtime.inputs import StepInputs, StepStates
from gpu_worker.runtime.interface import NO_UPDATES, PageUpdates

logger = logging.getLogger(__name__)

MARGIN = 0.02
"""By which part of a step's time `fused.products` must be quicker: chance does not decide between two equals."""

_ROWS, _POSITIONS, _TOKENS, _ADAPTERS, _INDPTR, _LAST = range(6)
_UPDATES = slice(6, 9)  # rows, columns and pages of new entries of the page table
_FIELDS = 9


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """A slot's inputs, int32 [fields, batch], pinned and on the device; and its outputs.

    logits: float32 [most, vocab]; hidden: [most, hidden], empty if the model decodes no values.
    """

    host: Tensor
    device: Tensor
    logits: Tensor
    hidden: Tensor

    def field(self, field: int, n: int) -> Tensor:
        return self.device[field, :n]


Layers = Callable[[Tensor, Forward], Tensor]
"""`Decoder.forward`, or what computes the same."""

Capture = Callable[[Callable[[], None]], Callable[[], object]]
"""Captures the kernels that a task launches as a graph. Returns the function that replays them."""


def cuda_capture(stream: CudaStream) -> Capture:
    """A `Capture` on CUDA. It raises ModelError, after which the process must exit: a failed capture leaves
    torch's allocator and generators in capture mode. Ending a failed capture raises too, which must not hide the
    cause."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], object]:
        stream.synchronize()
        graph, causes = torch.cuda.CUDAGraph(), list[Exception]()
        try:
            with torch.cuda.graph(graph, stream=stream.raw, pool=pool):
                try:
                    work()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception as error:
            cause = (causes or [error])[0]
            raise ModelError(
                f"a decode step could not be captured as a CUDA graph ({type(cause).__name__}: {cause}); "
                f"PETIOLE_CUDA_GRAPHS=off serves without, more slowly"
            ) from cause
        return graph.replay

    return capture


def eager(work: Callable[[], None]) -> Callable[[], object]:
    """A `Capture` that captures nothing: the replay runs the task, which uses the same buffers."""
    return work


def new_decode_buffers(most: int, decoder: Decoder, host: Device, device: torch.device) -> DecodeBuffers:
    config = decoder.config
    shape = (_FIELDS, -(-(most + 1) // 4) * 4)  # each field begins at a multiple of 16 bytes
    return DecodeBuffers(
        host=host.host_buffer(shape, torch.int32),
        device=torch.zeros(shape, dtype=torch.int32, device=device),
        logits=torch.zeros((most, config.vocab_size), dtype=torch.float32, device=device),
        hidden=torch.zeros(
            (most if decoder.n_values else 0, config.hidden_size), dtype=decoder.dtype, device=device
        ),
    )


class DecodeGraphs:
    """The captured decode steps of one slot."""

    def __init__(
        self,
        decoder: Decoder,
        geometry: Geometry,
        pending: Tensor,
        pending_values: Tensor,
        bank: AdapterBank | None,
        sizes: list[int],
        workspace: Tensor,
        host: Device,
    ) -> None:
        self._decoder, self._geometry, self._bank = decoder, geometry, bank
        self._pending, self._pending_values = pending, pending_values
        self._sizes = sizes
        self._buffers = new_decode_buffers(sizes[-1], decoder, host, geometry.device)
        n_indices = sizes[-1] * geometry.cache.table.shape[1]  # shared pages count for every row that shares them
        self._indices = torch.zeros(n_indices, dtype=torch.int32, device=geometry.device)
        self._wrappers = {size: DecodeWrappers(geometry, size, workspace, self._indices) for size in sizes}
        self._replays: dict[tuple[int, bool], Callable[[], object]] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def capture(self, stream: Stream, capture: Capture, fused: dict[int, bool]) -> None:
        """Warm up and capture every size, the largest first, so that the memory pool grows only once.

        `fused`: batch size -> whether `fused.products` is quicker. Filled by the first slot, so that a batch is
        computed alike in both.
        """
        usual = self._decoder.forward
        for size in reversed(self._sizes):
            if self._bank is not None:
                self._replays[size, True] = self._captured(size, True, usual, stream, capture)
            other = fused_layers(self._decoder, size)
            if other is not None and size not in fused:
                fused[size] = self._is_quicker(size, other, usual, stream, capture)
            layers = other if other is not None and fused[size] else usual
            self._replays[size, False] = self._captured(size, False, layers, stream, capture)

    def _captured(
        self, size: int, adapted: bool, layers: Layers, stream: Stream, capture: Capture
    ) -> Callable[[], object]:
        work = partial(self._forward, size, adapted, layers)
        stream.enqueue(partial(self._warm_up, size, work))
        stream.synchronize()
        return capture(work)

    def _is_quicker(self, size: int, other: Layers, usual: Layers, stream: Stream, capture: Capture) -> bool:
        """Whether `other` compiles for this card, and takes less time."""
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                self._warm_up(size, partial(self._forward, size, False, other))
            except Exception as error:
                failures.append(error)

        stream.enqueue(attempt)
        stream.synchronize()
        if failures:
            logger.warning("decode steps of %d are computed without fused products: %s", size, failures[0])
            return False
        fused_s, usual_s = (
            _seconds(stream, self._captured(size, False, layers, stream, capture)) for layers in (other, usual)
        )
        logger.info("decode steps of %d: %.3f ms, with fused products %.3f ms", size, usual_s * 1e3, fused_s * 1e3)
        return fused_s < (1 - MARGIN) * usual_s

    def _warm_up(self, size: int, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            self._prepare(size, np.zeros(0, np.int32), np.zeros(0, np.int32), NO_UPDATES)
            work()

    def _forward(self, size: int, adapted: bool, layers: Layers) -> None:
        from gpu_worker.runtime.fused.layers import gather_pages, token_slots, write_pages

        cache = self._geometry.cache
        rows, positions = self._buffers.field(_ROWS, size), self._buffers.field(_POSITIONS, size)
        write_pages(cache.table, *self._buffers.device[_UPDATES, :size])
        gather_pages(cache.table, rows, self._buffers.field(_INDPTR, size + 1), self._indices)
        deltas = None
        if adapted and self._bank is not None:
            deltas = CapturedDeltas(self._bank, self._buffers.field(_ADAPTERS, size))
        slots = token_slots(cache.table, rows, positions, cache.page_size)
        attention = FlashInferAttention(self._geometry, slots, self._wrappers[size].wrappers)
        step = Forward(positions, attention, deltas)
        hidden = layers(self._embed(size, rows.long()), step)
        if self._decoder.n_values:
            self._buffers.hidden[:size].copy_(hidden)
        self._buffers.logits[:size].copy_(self._decoder.head_output(hidden))

    def _embed(self, size: int, rows: Tensor) -> Tensor:
        tokens = self._buffers.field(_TOKENS, size).long()
        token_ids = torch.where(tokens < 0, self._pending[rows], tokens)
        if not self._decoder.n_values:
            return self._decoder.embed(token_ids)
        return cast(ValueDecoder, self._decoder).embed_values(token_ids, self._pending_values[rows])

    def run(self, inputs: StepInputs) -> StepStates:
        """Stage, plan and replay one decode step. Called in stream order."""
        n = len(inputs.batch_rows)
        size = next(s for s in self._sizes if s >= n)
        host = self._buffers.host.numpy()
        host[_TOKENS, :n] = inputs.token_ids
        host[_ADAPTERS, :size] = 0
        host[_ADAPTERS, :n] = inputs.adapters
        assert len(inputs.pages.rows) <= n, "one more position needs at most one more page"
        self._prepare(size, inputs.batch_rows, inputs.starts, inputs.pages)
        self._replays[size, self._bank is not None and bool(inputs.adapters.any())]()
        return StepStates(self._buffers.hidden[:n], lambda: self._buffers.logits[:n])

    def _prepare(self, size: int, rows: np.ndarray, starts: np.ndarray, updates: PageUpdates) -> None:
        """Fill the slot's buffers for `rows`, padded to `size`, and plan the attention over them."""
        n, host = len(rows), self._buffers.host.numpy()
        host[_ROWS, :size] = 0
        host[_POSITIONS, :size] = 0
        host[_TOKENS, n:size] = 0
        host[_ROWS, :n] = rows
        host[_POSITIONS, :n] = starts
        indptr, last = host_page_counts(host[_POSITIONS, :size] + 1, self._geometry.cache.page_size)
        host[_INDPTR, : size + 1] = indptr
        host[_LAST, :size] = last
        host[_UPDATES, :size] = 0  # row 0, column 0, page 0: what is there
        host[_UPDATES, : len(updates.rows)] = updates.rows, updates.columns, updates.pages
        self._buffers.device.copy_(self._buffers.host, non_blocking=True)
        pinned, indices = self._buffers.host, self._indices[: int(indptr[-1])]
        self._wrappers[size].plan(pinned[_INDPTR, : size + 1], indices, pinned[_LAST, :size])


def fused_layers(decoder: Decoder, size: int) -> Layers | None:
    """`fused.products` for a decode step of so many sequences, if it knows this model."""
    from gpu_worker.runtime.fused import products

    known = getattr(decoder.forward, "__func__", None) is Decoder.forward and products.fits(decoder)
    return partial(products.forward, decoder) if known and size <= products.MOST_ROWS else None


def _seconds(stream: Stream, replay: Callable[[], object]) -> float:
    """The least of a few rounds, for one replay of several that are enqueued together."""

    def once() -> None:
        with torch.inference_mode():
            replay()

    rounds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(10):
            stream.enqueue(once)
        stream.synchronize()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / 10
