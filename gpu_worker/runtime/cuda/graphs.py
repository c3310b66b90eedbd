"""Decode and verify steps as CUDA graphs: one per slot, kind and batch size of a ladder, captured once.

A graph reads rows, positions, tokens and new entries of the page table from the slot's device buffer, and pending
inputs and the page table at their fixed addresses. It writes the new entries into the page table. It writes the
list of the batch's pages and the logits (and bins, for models that decode values) to the slot's buffers.
The attention plan, which changes between replays, is written to the same memory before each replay. A batch
between two sizes is padded with row 0, whose positions lie in page 0.

In a verify step every row has as many positions as a row with all its drafts. Rows with fewer drafts are padded in
front. The padding writes to page 0 and attends to the cached positions of its row; its logits are not used.

    inputs    .  p  x  y     .  .  .  p     p  x  y  z          p: pending   x, y, z: drafts   .: padding
    outputs      1  2  3              7     8  9  10 11         the inputs whose logits are sampled, put together

A small batch is captured twice, with the usual kernels and with `fused.products`. The quicker graph is kept; which
one that is depends on the card and the shape.

All graphs that are kept share one memory pool. This is safe because they run one after another on one stream, and
outputs that outlive a replay are copied out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.lora import AdapterBank
from petiole.gpu_worker.request.values import N_BINS, NO_BIN
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    DecodeWrappers,
    FlashInferAttention,
    Geometry,
    host_page_counts,
)
from petiole.gpu_worker.runtime.cuda.deltas import CapturedDeltas
from petiole.gpu_worker.runtime.device.cuda import CudaStream
from petiole.gpu_worker.runtime.device.interface import Device, DeviceStream
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates
from petiole.gpu_worker.runtime.step.values import ValuedDecoder, bins_of, decode_all, embed_all

logger = logging.getLogger(__name__)

MARGIN = 0.02
"""The part of a step's time by which `fused.products` must be quicker, so that chance does not choose between
equals."""

_ROWS, _POSITIONS, _ROTARY, _TOKENS, _ADAPTERS, _OUTPUTS, _INDPTR, _LAST = range(8)
_UPDATES = slice(8, 11)  # rows, columns and pages of new entries of the page table
_FIELDS = 11


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """A slot's inputs, int32 [fields, positions], pinned and on the device; its page list, int32; and its outputs.

    logits: [positions, vocab]; bins: int32 [positions, 1 + N_BINS], those of either kind of value (see
    `step.values`), empty if the model decodes none.
    """

    host: Tensor
    device: Tensor
    indices: Tensor
    logits: Tensor
    bins: Tensor

    def field(self, field: int, n: int) -> Tensor:
        return self.device[field, :n]


Layers = Callable[[Tensor, Forward], Tensor]
"""`Decoder.forward`, or another function that computes the same."""


class Capture(Protocol):
    """Captures the kernels that a task launches as a graph. Returns the function that replays them."""

    def __call__(self, work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
        """`kept`: the graph stays, and shares the other graphs' memory. Otherwise it has memory of its own, which
        is freed with it."""
        ...


def cuda_capture(stream: CudaStream) -> Capture:
    """A `Capture` on CUDA. It raises ModelError, after which the process must exit: a failed capture leaves
    torch's allocator and generators in capture mode. Ending a failed capture raises too, which must not hide the
    cause."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
        stream.synchronize()
        graph, causes = torch.cuda.CUDAGraph(), list[Exception]()
        try:
            with torch.cuda.graph(
                graph,
                stream=stream.raw,
                pool=pool if kept else None,
                capture_error_mode="thread_local",  # others pin memory, for adapters, while weights are reloaded
            ):
                try:
                    work()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception as error:
            cause = (causes or [error])[0]
            raise ModelError(
                f"a decode step could not be captured as a CUDA graph ({type(cause).__name__}: {cause}); "
                f"PETIOLE_CUDA_GRAPHS=off serves without graphs, more slowly"
            ) from cause
        return graph.replay

    return capture


def eager(work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
    """A `Capture` that captures nothing: the replay runs the task, which uses the same buffers."""
    return work


def new_decode_buffers(
    rows: int, queries: int, decoder: Decoder, geometry: Geometry, host: Device
) -> DecodeBuffers:
    """For batches of up to `rows`, of `queries` positions each."""
    config, device, most = decoder.config, geometry.device, rows * queries
    shape = (_FIELDS, -(-(most + 1) // 4) * 4)  # each field begins at a multiple of 16 bytes
    n_indices = rows * geometry.cache.table.shape[1]  # shared pages count for every row that shares them
    return DecodeBuffers(
        host=host.host_buffer(shape, torch.int32),
        device=torch.zeros(shape, dtype=torch.int32, device=device),
        indices=torch.zeros(n_indices, dtype=torch.int32, device=device),
        logits=torch.zeros((most, config.vocab_size), dtype=decoder.dtype, device=device),
        bins=torch.zeros(
            (0 if decoder.value_tokens is None else most, 1 + N_BINS), dtype=torch.int32, device=device
        ),
    )


class DecodeGraphs:
    """The captured steps of one slot in which each row has `queries` positions. All graphs of a slot share its
    `buffers`, which belong to one step at a time."""

    def __init__(
        self,
        decoder: Decoder,
        geometry: Geometry,
        pending: Tensor,
        pending_bins: Tensor,
        bank: AdapterBank | None,
        sizes: list[int],
        workspace: Tensor,
        buffers: DecodeBuffers,
        queries: int = 1,
    ) -> None:
        self._decoder, self._geometry, self._bank = decoder, geometry, bank
        self._pending, self._pending_bins = pending, pending_bins
        self._sizes, self._buffers, self._queries = sizes, buffers, queries
        self._wrappers = {
            size: DecodeWrappers(geometry, size, workspace, buffers.indices, queries) for size in sizes
        }
        self._replays: dict[tuple[int, bool], Callable[[], object]] = {}

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a step can be padded to a captured one. Each position must have a position to attend to."""
        small = len(inputs.batch_rows) <= self._sizes[-1] and inputs.bins is None
        return small and (self._queries == 1 or int((inputs.starts + inputs.lengths).min()) >= self._queries)

    def capture(self, stream: DeviceStream, capture: Capture, fused: dict[int, bool]) -> None:
        """Warm up and capture every size, the largest first, so that the memory pool grows only once.

        `fused`: number of positions -> whether `fused.products` is quicker. The first slot fills it in, so that
        both slots compute alike."""
        usual = self._decoder.forward
        for size in reversed(self._sizes):
            if self._bank is not None:
                self._replays[size, True] = self._captured(size, True, usual, stream, capture)
            n = size * self._queries
            other = fused_layers(self._decoder, n)
            if other is not None and n not in fused:
                fused[n] = self._is_quicker(size, other, usual, stream, capture)
            layers = other if other is not None and fused[n] else usual
            self._replays[size, False] = self._captured(size, False, layers, stream, capture)

    def _captured(
        self, size: int, adapted: bool, layers: Layers, stream: DeviceStream, capture: Capture, kept: bool = True
    ) -> Callable[[], object]:
        work = partial(self._forward, size, adapted, layers)
        stream.enqueue(partial(self._warm_up, size, work))
        stream.synchronize()
        return capture(work, kept=kept)

    def _is_quicker(self, size: int, other: Layers, usual: Layers, stream: DeviceStream, capture: Capture) -> bool:
        """Whether `other` compiles for this card and takes less time."""
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                self._warm_up(size, partial(self._forward, size, False, other))
            except Exception as error:
                failures.append(error)

        stream.enqueue(attempt)
        stream.synchronize()
        if failures:
            n = size * self._queries
            logger.warning("steps of %d positions are computed without fused products: %s", n, failures[0])
            return False
        fused_s, usual_s = (
            _seconds(stream, self._captured(size, False, layers, stream, capture, kept=False))
            for layers in (other, usual)
        )
        n, usual_ms, fused_ms = size * self._queries, usual_s * 1e3, fused_s * 1e3
        logger.info("steps of %d positions: %.3f ms, with fused products %.3f ms", n, usual_ms, fused_ms)
        return fused_s < (1 - MARGIN) * usual_s

    def _warm_up(self, size: int, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            self._prepare(size, None)
            work()

    def _forward(self, size: int, adapted: bool, layers: Layers) -> None:
        from petiole.gpu_worker.runtime.cuda.fused.layers import gather_pages, token_slots, write_pages

        cache, n = self._geometry.cache, size * self._queries
        rows, positions = self._buffers.field(_ROWS, n), self._buffers.field(_POSITIONS, n)
        write_pages(cache.table, *self._buffers.device[_UPDATES, :n])
        batch_rows = rows[self._queries - 1 :: self._queries]  # their last positions are never padding
        gather_pages(cache.table, batch_rows, self._buffers.field(_INDPTR, size + 1), self._buffers.indices)
        deltas = None
        if adapted and self._bank is not None:
            deltas = CapturedDeltas(self._bank, self._buffers.field(_ADAPTERS, n))
        slots = token_slots(cache.table, rows, positions, cache.page_size)
        attention = FlashInferAttention(self._geometry, slots, self._wrappers[size].wrappers)
        rotary = self._buffers.field(_ROTARY, n)
        hidden = layers(self._embed(n, rows.long()), Forward(rotary, attention, deltas))
        if self._queries > 1:
            hidden = hidden[self._buffers.field(_OUTPUTS, n)]
        if self._decoder.value_tokens is not None:
            self._buffers.bins[:n].copy_(decode_all(cast(ValuedDecoder, self._decoder), hidden))
        self._buffers.logits[:n].copy_(self._decoder.head_output(hidden))

    def _embed(self, n: int, rows: Tensor) -> Tensor:
        tokens = self._buffers.field(_TOKENS, n).long()
        token_ids = torch.where(tokens < 0, self._pending[rows], tokens)
        if self._decoder.value_tokens is None:
            return self._decoder.embed(token_ids)
        bins = torch.where((tokens < 0)[:, None], self._pending_bins[rows], NO_BIN)
        return embed_all(cast(ValuedDecoder, self._decoder), token_ids, bins)

    def run(self, inputs: StepInputs) -> StepStates:
        """Stage, plan and replay one step that `fits`. Called in stream order."""
        size, n = next(s for s in self._sizes if s >= len(inputs.batch_rows)), len(inputs.output_inputs)
        self._prepare(size, inputs)
        self._replays[size, self._bank is not None and bool(inputs.adapters.any())]()
        buffers, tokens = self._buffers, self._decoder.value_tokens
        bins = None if tokens is None else partial(bins_of, buffers.bins[:n], tokens=tokens)
        return StepStates(lambda: buffers.logits[:n], bins)

    def _prepare(self, size: int, inputs: StepInputs | None) -> None:
        """Fill the slot's buffers with a step padded to `size` rows, or with padding alone, and plan the attention
        over them."""
        host, queries = self._buffers.host.numpy(), self._queries
        lengths = np.full(size, queries, dtype=np.int32)
        host[:_INDPTR, : size * queries] = 0
        host[_UPDATES, : size * queries] = 0  # row 0, column 0, page 0: what is there
        if inputs is not None:
            lengths[: len(inputs.starts)] = inputs.starts + inputs.lengths
            self._stage(host, inputs)
        indptr, last = host_page_counts(lengths, self._geometry.cache.page_size)
        host[_INDPTR, : size + 1] = indptr
        host[_LAST, :size] = last
        self._buffers.device.copy_(self._buffers.host, non_blocking=True)
        pinned, indices = self._buffers.host, self._buffers.indices[: int(indptr[-1])]
        self._wrappers[size].plan(pinned[_INDPTR, : size + 1], indices, pinned[_LAST, :size])

    def _stage(self, host: np.ndarray, inputs: StepInputs) -> None:
        n = len(inputs.batch_rows)
        at: slice | np.ndarray = slice(n)
        adapters, updates = inputs.adapters, inputs.pages
        if self._queries > 1:
            at = ragged_arange(np.arange(1, n + 1) * self._queries - inputs.lengths, inputs.lengths)
            adapters = np.repeat(adapters, inputs.lengths)
            host[_OUTPUTS, : len(inputs.output_inputs)] = at[inputs.output_inputs]
        host[_ROWS, at] = inputs.rows
        host[_POSITIONS, at] = inputs.positions
        host[_ROTARY, at] = inputs.positions if inputs.rotary is None else inputs.rotary
        host[_TOKENS, at] = inputs.token_ids
        host[_ADAPTERS, at] = adapters
        assert len(updates.rows) <= n * self._queries, "one more position needs at most one more page"
        host[_UPDATES, : len(updates.rows)] = updates.rows, updates.columns, updates.pages


def fused_layers(decoder: Decoder, n: int) -> Layers | None:
    """`fused.products` for a step of `n` positions; None if it cannot compute this model or that many
    positions."""
    from petiole.gpu_worker.runtime.cuda.fused import products

    known = getattr(decoder.forward, "__func__", None) is Decoder.forward and products.fits(decoder)
    return partial(products.forward, decoder) if known and n <= products.MOST_ROWS else None


def _seconds(stream: DeviceStream, replay: Callable[[], object]) -> float:
    """Seconds of one replay: the least of a few rounds, each with several replays enqueued together."""

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
