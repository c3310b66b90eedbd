"""Steps as CUDA graphs: for each slot one for each shape of a ladder (`shapes`), captured once.

A graph reads rows, positions, tokens and new entries of the page tables from the slot's device buffer, and pending
inputs and the page tables at their fixed addresses. It writes the new entries into the page tables. It writes the
lists of the batch's pages and the step's results to the slot's buffers. The attention plan, which changes between
replays, is written to the same memory before each replay. A step between two shapes is padded with row 0, whose
positions lie in page 0.

In a decode or verify step every row has as many positions as a row with all its drafts. Rows with fewer drafts are
padded in front. The padding writes to page 0 and attends to the cached positions of its row; its logits are not
used. The results are logits (and numbers, for models with values).

    inputs    .  p  x  y     .  .  .  p     p  x  y  z          p: pending   x, y, z: drafts   .: padding
    outputs      1  2  3              7     8  9  10 11         the inputs whose logits are sampled, put together

In a prefill or a mixed step, rows of any length lie one after the other. The padding follows the last row, and
belongs to no row of the attention: the padding's values are undefined, and reach nothing but page 0. The results
are hidden states. The output head is applied to them after the graph, because most chunks sample nothing.

    inputs    a  b  c  d  p  e  f  .  .                         a to f: of prompts
    outputs            3  4     6                               hidden states, put together

A small batch is captured twice, with the usual kernels and with fused products (`linear.decode`, and by the switch
`untimed` `linear.split_k`). The quicker graph is kept; which one that is depends on the card and the shape.

All graphs that are kept share one memory pool. This is safe because they run one after another on one stream, and
outputs that outlive a replay are copied out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.fast_paths import Parts, supports
from petiole.gpu_worker.models.parts.recurrent.states import LayerState
from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear
from petiole.gpu_worker.models.weights.names import LinearName
from petiole.gpu_worker.models.weights.quantized import KernelLinear
from petiole.gpu_worker.request.values import NO_NUMBER
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    AppendWrappers,
    DecodeWrappers,
    FlashInferAttention,
    FlashInferKernels,
    Geometry,
    PageList,
    host_page_counts,
)
from petiole.gpu_worker.runtime.cuda.attention.latents import LatentWrappers
from petiole.gpu_worker.runtime.cuda.attention.split import SplitWrappers, is_chosen
from petiole.gpu_worker.runtime.cuda.capture import Capture
from petiole.gpu_worker.runtime.cuda.recurrent import StatesOnCuda
from petiole.gpu_worker.runtime.cuda.shapes import Shape
from petiole.gpu_worker.runtime.cuda.supported import FUSED, SPLIT_K, tried
from petiole.gpu_worker.runtime.device.device import Device, DeviceStream
from petiole.gpu_worker.runtime.interface import NO_UPDATES, VALUES, VECTORS, Int32Array, Int64Array
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.token_values import ValuedDecoder, embed_all, made_of_all

logger = logging.getLogger(__name__)

MARGIN = 0.02
"""The part of a step's time by which fused products must be quicker, so that chance does not choose between
equals."""

ROUNDS, REPLAYS = 4, 10
"""How often a step is timed, and how many replays each time takes."""

FUSED_PARTS: Parts = frozenset({FlashInferKernels, DenseLinear, Fp8Linear, KernelLinear})
"""The parts in whose place fused products compute, or which they call. See `models.fast_paths`."""

_ROWS, _POSITIONS, _ROTARY, _TOKENS, _ADAPTERS, _OUTPUTS, _BATCH_ROWS, _QUERIES, _LAST = range(9)
_OF, _COPIES = 9, 10  # see `StatesOnCuda`
_UPDATED = slice(11, 13)  # rows and columns of new entries of the page tables
_FIELDS = 13  # and three of each group of layers: see `StepBuffers.of_groups`


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """A slot's inputs, int32 [fields, positions], pinned and on the device; its page lists, int32, of each group;
    and its results.

    logits, tokens and values are the results of decodes and verifications. logits: [positions, vocab]. tokens:
    int64 [positions], the likeliest ones, of graphs that find them. values: int32 [positions, width], the lines
    beside the tokens (see `step.values`); empty for a model without values.
    hidden: [positions, hidden], the results of all other steps."""

    host: Tensor
    device: Tensor
    indices: tuple[Tensor, ...]
    logits: Tensor
    tokens: Tensor
    values: Tensor
    hidden: Tensor

    def field(self, field: int, n: int) -> Tensor:
        return self.device[field, :n]

    @property
    def of_groups(self) -> tuple[slice, slice, slice]:
        """The fields of each group: the pages of new entries of its table; its `RowPages`, firsts and indptr."""
        n = len(self.indices)
        pages, firsts, indptr = (slice(first, first + n) for first in range(_FIELDS, _FIELDS + 3 * n, n))
        return pages, firsts, indptr


Layers = Callable[[Tensor, Forward], Tensor]
"""`Decoder.forward`, or another function that computes the same."""


def listed_columns(columns: int, window: int, positions: int, page_size: int) -> int:
    """The most pages of a row that a captured step of so many positions lists of a group with this window, if any;
    columns: of the page table."""
    return min(columns, (window + positions) // page_size + 2) if window else columns


def new_step_buffers(shapes: Sequence[Shape], decoder: Decoder, geometry: Geometry, host: Device) -> StepBuffers:
    """Buffers for steps of all these shapes."""
    plan, device, kinds = decoder.plan, geometry.device, decoder.value_tokens
    rows, positions = max(shape.rows for shape in shapes), max(shape.positions for shape in shapes)
    with_logits = max(shape.positions for shape in shapes if shape.queries)
    with_hidden = max((shape.positions for shape in shapes if not shape.queries), default=0)
    cache = geometry.cache
    columns, windows = cache.table.shape[1], (0, *(pool.window for pool in cache.windows))
    most = [listed_columns(columns, window, positions, cache.page_size) for window in windows]
    fields = (_FIELDS + 3 * len(most), -(-(positions + 1) // 4) * 4)  # each begins at a multiple of 16 bytes
    return StepBuffers(
        host=host.host_buffer(fields, torch.int32),
        device=torch.zeros(fields, dtype=torch.int32, device=device),
        indices=tuple(torch.zeros(rows * n, dtype=torch.int32, device=device) for n in most),
        logits=torch.zeros((with_logits, plan.head_size), dtype=decoder.dtype, device=device),
        tokens=torch.zeros(with_logits, dtype=torch.int64, device=device),
        values=torch.zeros((with_logits, 0 if kinds is None else kinds.width), dtype=torch.int32, device=device),
        hidden=torch.zeros((with_hidden, plan.hidden_size), dtype=decoder.dtype, device=device),
    )


class Graphs:
    """The captured steps of one slot and one layout. All graphs of a slot share its `buffers`, which belong to one
    step at a time."""

    def __init__(
        self,
        decoder: Decoder,
        geometry: Geometry,
        pending: PendingInputs,
        bank: AdapterBank | None,
        states: Sequence[LayerState | None] | None,
        workspace: Tensor,
        buffers: StepBuffers,
        shapes: Sequence[Shape],
    ) -> None:
        """states: of each layer, if some keep one. shapes: of one layout, the smallest first."""
        self._decoder, self._geometry, self._bank, self._states = decoder, geometry, bank, states
        self._pending = pending
        self._buffers, self._shapes = buffers, shapes
        self._wrappers = {shape: new_wrappers(geometry, shape, workspace, buffers.indices) for shape in shapes}
        self._replays: dict[tuple[Shape, bool], Callable[[], object]] = {}
        self._finding: set[Shape] = set()  # without adapters, these find the likeliest tokens

    def capture(self, stream: DeviceStream, capture: Capture, fused: dict[int, bool]) -> None:
        """Warm up and capture every shape, the largest first, so that the memory pool grows only once.

        `fused`: number of positions -> whether fused products are quicker. The first slot fills it in, so that
        both slots compute alike."""
        usual = self._decoder.forward
        for shape in reversed(self._shapes):
            if self._bank is not None and shape.queries:
                self._replays[shape, True] = self._captured(shape, True, usual, stream, capture)
            n = shape.positions
            other = fused_layers(self._decoder, n)
            if other is not None and n not in fused:
                fused[n] = self._is_quicker(shape, other, usual, stream, capture)
            layers = other if other is not None and fused[n] else usual
            self._replays[shape, False] = self._captured(shape, False, layers, stream, capture)
            if shape.queries and self._finds_tokens(n, fused=layers != usual):
                self._finding.add(shape)

    def _captured(
        self,
        shape: Shape,
        adapted: bool,
        layers: Layers,
        stream: DeviceStream,
        capture: Capture,
        kept: bool = True,
    ) -> Callable[[], object]:
        work = partial(self._forward, shape, adapted, layers)
        stream.enqueue(partial(self._warm_up, shape, work))
        stream.synchronize()
        return capture(work, kept=kept)

    def _is_quicker(
        self, shape: Shape, other: Layers, usual: Layers, stream: DeviceStream, capture: Capture
    ) -> bool:
        """Whether `other` compiles for this card and takes less time."""
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                self._warm_up(shape, partial(self._forward, shape, False, other))
            except Exception as error:
                failures.append(error)

        stream.enqueue(attempt)
        stream.synchronize()
        n = shape.positions
        if failures:
            logger.warning("steps of %d positions are computed without fused products: %s", n, failures[0])
            return False
        fused_s, usual_s = (
            _seconds(stream, self._captured(shape, False, layers, stream, capture, kept=False))
            for layers in (other, usual)
        )
        usual_ms, fused_ms = usual_s * 1e3, fused_s * 1e3
        logger.info("steps of %d positions: %.3f ms, with fused products %.3f ms", n, usual_ms, fused_ms)
        return fused_s < (1 - MARGIN) * usual_s

    def _warm_up(self, shape: Shape, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            self._prepare(shape, None)
            work()

    def _forward(self, shape: Shape, adapted: bool, layers: Layers) -> None:
        from petiole.gpu_worker.runtime.cuda.fused.layers import gather_pages, token_slots, write_pages

        cache, n, field = self._geometry.cache, shape.positions, self._buffers.field
        rows, positions = field(_ROWS, n), field(_POSITIONS, n)
        pages, firsts, indptr = (self._buffers.device[fields] for fields in self._buffers.of_groups)
        updated, columns = self._buffers.device[_UPDATED, :n]
        write_pages(cache.tables, updated, columns, pages[:, :n])
        # The last position of a row with padding is not the row's own.
        batch_rows = rows[shape.queries - 1 :: shape.queries] if shape.queries else field(_BATCH_ROWS, shape.rows)
        for group, listed in enumerate(self._buffers.indices):
            own = firsts[group, : shape.rows], indptr[group, : shape.rows + 1]
            gather_pages(cache.tables[group], batch_rows, *own, listed)
        terms = None
        if adapted and self._bank is not None:
            terms = CapturedTerms(self._bank, field(_ADAPTERS, n))
        slots = token_slots(cache.tables, rows, positions, cache.page_size)
        attention = FlashInferAttention(self._geometry, slots, self._wrappers[shape].wrappers)
        pending, token_ids = self._token_ids(n, rows.long())
        embedded = self._embed(rows.long(), token_ids, pending)
        states = None
        if self._states is not None:
            bounds = field(_QUERIES, shape.rows + 1)
            states = StatesOnCuda(self._states, batch_rows, bounds, field(_OF, n), field(_COPIES, n))
        mixed = any(layer.experts is not None for layer in self._decoder.plan.layers)
        real = rows > 0 if mixed else None  # padding takes no expert
        step = Forward(field(_ROTARY, n), attention, terms, token_ids, states=states, real=real)
        hidden = layers(embedded, step)
        if shape.queries != 1:
            hidden = hidden[field(_OUTPUTS, n)]
        if not shape.queries:
            self._buffers.hidden[:n].copy_(hidden)
            return
        if self._decoder.value_tokens is not None:
            self._buffers.values[:n].copy_(made_of_all(cast(ValuedDecoder, self._decoder), hidden))
        if self._finds_tokens(n, fused=layers != self._decoder.forward):
            from petiole.gpu_worker.runtime.cuda.fused.linear import split_k

            head = cast(DenseLinear, self._decoder.head)
            normed = self._decoder.normed(hidden)
            split_k.write_logits(normed, head, self._buffers.logits[:n], self._buffers.tokens[:n])
        else:
            self._write_logits(hidden, self._buffers.logits[:n])

    def _write_logits(self, hidden: Tensor, logits: Tensor) -> None:
        decoder = self._decoder
        if self._plain_logits:
            cast(DenseLinear, decoder.head).write(decoder.normed(hidden), logits)
        else:
            logits.copy_(decoder.head_output(hidden))

    @property
    def _plain_logits(self) -> bool:
        """Whether logits are a product behind the last norm, and nothing else. A decoder that nobody knows, whose
        steps are not captured, may compute them otherwise."""
        if getattr(type(self._decoder), "head_output", None) != Decoder.head_output:
            return False
        plan, head = self._decoder.plan, type(self._decoder.head)
        return head is DenseLinear and plan.logits_factor == 1.0 and not plan.logits_softcap

    def _finds_tokens(self, n: int, fused: bool) -> bool:
        """Whether a step of n positions, with or without fused products, finds the likeliest tokens itself."""
        if not fused or not tried("rows") or not self._plain_logits:
            return False
        from petiole.gpu_worker.runtime.cuda.fused.linear import split_k

        return split_k.writes(self._decoder.head, n)

    def _token_ids(self, n: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens come from their rows' pending buffers, and all tokens."""
        tokens = self._buffers.field(_TOKENS, n).long()
        return tokens < 0, torch.where(tokens < 0, self._pending.token_ids[rows], tokens)

    def _embed(self, rows: Tensor, token_ids: Tensor, pending: Tensor) -> Tensor:
        if self._decoder.value_tokens is None:
            return self._decoder.embed(token_ids)
        lines = torch.where(pending[:, None], self._pending.values[rows], NO_NUMBER)
        return embed_all(cast(ValuedDecoder, self._decoder), token_ids, lines)

    def shape_for(self, inputs: StepInputs) -> Shape | None:
        """The smallest captured step that this one can be padded to, or None."""
        several_axes = inputs.rotary is not None and inputs.rotary.ndim > 1
        if inputs.values is not None or inputs.limits is not None or several_axes:
            return None
        rows, positions = len(inputs.batch_rows), len(inputs.positions)
        shape = next((s for s in self._shapes if s.rows >= rows and s.positions >= positions), None)
        if shape is None or (shape, self._adapted(inputs)) not in self._replays:
            return None
        if shape.queries and int(inputs.lengths.max()) > shape.queries:
            return None
        if shape.queries > 1 and int((inputs.starts + inputs.lengths).min()) < shape.queries:
            return None  # each position, also of padding, must have a position to attend to
        return shape

    def _adapted(self, inputs: StepInputs) -> bool:
        return self._bank is not None and bool(inputs.adapters.any())

    def run(self, shape: Shape, inputs: StepInputs, copies: Int64Array | None = None) -> StepStates:
        """Stage, plan and replay one step whose `shape_for` this is. Called in stream order. copies: see
        `StatePool.begin`."""
        self._prepare(shape, inputs, copies)
        self._replays[shape, self._adapted(inputs)]()
        n, buffers = len(inputs.output_inputs), self._buffers
        if not shape.queries:
            return states_of(self._decoder, buffers.hidden[:n])
        logits, values = buffers.logits[:n], buffers.values[:n]
        sides = {} if self._decoder.value_tokens is None else {VALUES: lambda _: values}
        found = shape in self._finding and not self._adapted(inputs)
        return StepStates(lambda: logits, sides, likeliest=buffers.tokens[:n] if found else None)

    def _prepare(self, shape: Shape, inputs: StepInputs | None, copies: Int64Array | None = None) -> None:
        """Fill the slot's buffers with a step padded to this shape, or with padding alone, and plan the attention
        over them."""
        host, rows, n = self._buffers.host.numpy(), shape.rows, shape.positions
        host[:_QUERIES, :n] = 0
        pages, firsts, indptr = self._buffers.of_groups
        host[_UPDATED, :n] = host[pages, :n] = 0  # row 0, column 0, page 0: an update that changes nothing
        if inputs is not None:
            self._stage(shape, host, inputs)
        starts, queries, ends = step_lengths(shape, inputs)
        found = host_page_counts(self._geometry.cache, starts, queries, ends)
        host[firsts, :rows], host[indptr, : rows + 1], host[_LAST, :rows] = found
        np.cumsum(queries, out=host[_QUERIES, 1 : rows + 1])
        host[_OF, : queries.sum()] = np.arange(rows).repeat(queries)
        host[_COPIES, :n] = -1
        if copies is not None:
            host[_COPIES, : len(copies)] = copies
        self._buffers.device.copy_(self._buffers.host, non_blocking=True)
        pinned, sizes = self._buffers.host, found.indptr[:, -1].tolist()
        each = zip(pinned[indptr, : rows + 1], self._buffers.indices, sizes, strict=True)
        lists = [PageList(bounds, listed[:size]) for bounds, listed, size in each]
        last, wrappers = pinned[_LAST, :rows], self._wrappers[shape]
        if isinstance(wrappers, DecodeWrappers | SplitWrappers):
            wrappers.plan(lists, last)
        else:
            wrappers.plan(pinned[_QUERIES, : rows + 1], lists, last)

    def _stage(self, shape: Shape, host: np.ndarray, inputs: StepInputs) -> None:
        n, positions = len(inputs.batch_rows), len(inputs.positions)
        at: slice | np.ndarray = slice(positions)
        updates = inputs.pages
        if shape.queries > 1 and positions < n * shape.queries:  # some rows are padded
            at = ragged_arange(np.arange(1, n + 1) * shape.queries - inputs.lengths, inputs.lengths)
        if shape.queries != 1:
            outputs = inputs.output_inputs
            host[_OUTPUTS, : len(outputs)] = outputs if isinstance(at, slice) else at[outputs]
        if not shape.queries:
            host[_BATCH_ROWS, :n] = inputs.batch_rows
        host[_ROWS, at] = inputs.rows
        host[_POSITIONS, at] = inputs.positions
        host[_ROTARY, at] = inputs.positions if inputs.rotary is None else inputs.rotary
        host[_TOKENS, at] = inputs.token_ids
        if self._bank is not None:
            host[_ADAPTERS, at] = inputs.adapters if shape.queries == 1 else inputs.adapters.repeat(inputs.lengths)
        if len(updates.rows) > shape.positions:  # a cached prefix, or a row that was remapped
            self._geometry.cache.update(updates)
            updates = NO_UPDATES
        host[_UPDATED, : len(updates.rows)] = updates.rows, updates.columns
        host[self._buffers.of_groups[0], : len(updates.rows)] = (updates.pages, *updates.windows)


def new_wrappers(
    geometry: Geometry, shape: Shape, workspace: Tensor, indices: Sequence[Tensor]
) -> DecodeWrappers | SplitWrappers | AppendWrappers | LatentWrappers:
    if geometry.plan.reads_latents:
        return LatentWrappers(geometry, workspace, shape.rows, indices, shape.queries)
    if shape.queries:
        kind = SplitWrappers if is_chosen(geometry, shape) else DecodeWrappers
        return kind(geometry, shape.rows, workspace, indices, shape.queries)
    return AppendWrappers(geometry, workspace, shape.rows, indices)


def step_lengths(shape: Shape, inputs: StepInputs | None) -> tuple[Int32Array, Int32Array, Int32Array]:
    """int32 [rows] each: where a row's own positions begin, how many positions it has in the step, padding
    included, and how many are cached after it. A warm-up step of the layout with rows of any number is full,
    because nothing larger may be planned later."""
    rows, n = shape.rows, 0 if inputs is None else len(inputs.starts)
    if shape.queries or inputs is None:
        shorter, longer = divmod(shape.positions, rows)
        queries = np.full(rows, shorter, np.int32)
        queries[:longer] += 1
    else:
        queries = np.zeros(rows, np.int32)
        queries[:n] = inputs.lengths
    starts, ends = np.zeros_like(queries), queries.copy()
    if inputs is not None:
        starts[:n], ends[:n] = inputs.starts, inputs.starts + inputs.lengths
    return starts, queries, ends


def states_of(decoder: Decoder, outputs: Tensor) -> StepStates:
    """The results of a step with these hidden states: [O, hidden]."""

    def values(_: Tensor) -> Tensor:
        return made_of_all(cast(ValuedDecoder, decoder), outputs)

    if decoder.plan.pooling is not None:
        return StepStates(lambda: decoder.head_output(outputs), {VECTORS: lambda _: decoder.vectors(outputs)})
    sides = {} if decoder.value_tokens is None else {VALUES: values}
    return StepStates(lambda: decoder.head_output(outputs), sides)


def fused_layers(decoder: Decoder, n: int) -> Layers | None:
    """Fused products for a step of `n` positions: `linear.decode`, or `linear.split_k` where only that can compute
    this model or that many positions; None if neither can."""
    from petiole.gpu_worker.runtime.cuda.fused.linear import decode, split_k

    ways = [(decode, FUSED), *([(split_k, SPLIT_K)] if tried("rows") else [])]
    for way, values in ways:
        if n <= way.MOST_ROWS and supports(decoder, values, FUSED_PARTS).reason is None and way.fits(decoder):
            return partial(way.forward, decoder)
    return None


def _seconds(stream: DeviceStream, replay: Callable[[], object]) -> float:
    """Seconds of one replay: the least of some rounds, each with several replays enqueued together."""

    def once() -> None:
        with torch.inference_mode():
            replay()

    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPLAYS):
            stream.enqueue(once)
        stream.synchronize()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / REPLAYS


class CapturedTerms:
    """The terms of a decode step on CUDA, each position with its own adapter's matrices.

    The host decides nothing, so the terms can be captured in a graph. adapter_slots: int32 [T].
    `models.adapters.lora` has the formula.
    """

    def __init__(self, bank: AdapterBank, adapter_slots: Tensor) -> None:
        self._bank = bank
        self._of = adapter_slots

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None:
        from petiole.gpu_worker.runtime.cuda.fused.adapters import add_terms

        slots = self._bank.slots(layer, name)
        add_terms(x, y, slots.a, slots.b, self._of, self._bank.ranks)
