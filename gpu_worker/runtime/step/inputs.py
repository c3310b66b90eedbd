"""The arrays of a step, prepared on the host at launch.

rows     [B]  7          3             5
starts   [B]  12         0             40
lengths  [B]  1          4             3
inputs   [T]  p          a  b  c  d    p  x  y       p: the row's pending token
position [T]  12         0  1  2  3    40 41 42
outputs  [B]  1          1             3
last     [O]  0          4             5  6  7       inputs whose logits are sampled; others may score the prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.request.prepared_images import IMAGE
from petiole.gpu_worker.runtime.interface import (
    FEATURES,
    PENDING,
    TYPES,
    VALUES,
    Int32Array,
    Int64Array,
    PageUpdates,
    StateUpdates,
    StepBatch,
    StepKind,
)

Parts = Sequence[tuple[int, Tensor]]
"""A side input on the device: the index of the first input of each part, and the part. FEATURES: [1 + extra,
positions, hidden], of an image or a part of one (see `ImageDecoder`)."""

_NONE = np.empty(0, np.int64)


def adding_behind(parts: Parts) -> Callable[[int, Tensor], None] | None:
    """Adds what images have for the residual stream behind the first layers: see `Forward.behind`. None if they
    have nothing for it."""
    deep = [(at, features[1:]) for at, features in parts if len(features) > 1]

    def add(layer: int, hidden: Tensor) -> None:
        for at, features in deep:
            if layer < len(features):
                hidden[at : at + features.shape[1]] += features[layer]

    return add if deep else None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of a step.

    rows, positions: [T]. token_ids: [T]; PENDING if a token comes from its row's pending buffer. pending_inputs:
    the indices of the inputs that are PENDING. output_inputs: [O + S], the indices of the inputs whose logits are
    wanted, ascending. known_pending_rows, known_pending, known_values: [B'], next inputs to write to the pending
    buffers of these rows. batch_rows, starts, lengths: [B], pages and states: as in `StepBatch`. values, types:
    [T], the side inputs VALUES and TYPES. kept: the side inputs that are on the device, by name. adapters: [B],
    the adapter slot of each sequence. limits: [T], for each input the end of the positions that it sees; None: all
    up to itself. rotary: [T] or [axes, T]; None: the same as positions. sampled: [O], which of the `output_inputs`
    are sampled from; scored: [S], which score a given token; None: all are sampled from."""

    kind: StepKind
    rows: Int64Array
    positions: Int64Array
    token_ids: Int64Array
    pending_inputs: Int64Array
    output_inputs: Int64Array
    known_pending_rows: Int64Array
    known_pending: Int64Array
    batch_rows: Int64Array
    starts: Int32Array
    lengths: Int32Array
    adapters: Int32Array
    pages: PageUpdates
    values: Int32Array | None = None
    types: Int64Array | None = None
    known_values: Int32Array | None = None
    limits: Int64Array | None = None
    rotary: Int64Array | None = None
    kept: Mapping[str, Parts] = field(default_factory=dict)
    states: StateUpdates | None = None
    sampled: Int64Array | None = None
    scored: Int64Array | None = None
    of_tokens: Sequence[Sequence[str]] | None = None
    unpooled: Sequence[int] | None = None

    @property
    def sampled_inputs(self) -> Int64Array:
        """[O], the indices of the inputs whose logits are sampled."""
        return self.output_inputs if self.sampled is None else self.output_inputs[self.sampled]

    def of_outputs(self, array: Int64Array) -> Int64Array:
        """The elements of an array [T] whose logits are sampled: [O]. The array itself, if these are all."""
        inputs = self.sampled_inputs
        return array if len(inputs) == len(array) else array[inputs]


class DraftingHead(Protocol):
    """The head that drafts, behind one step. A chain of drafts is made by `first`, and by `again` for each further
    one."""

    def first(self, following: Int64Array, at: Int64Array) -> Tensor:
        """Keep the layer's keys and values of all inputs. following: [T], the token after each. at: [n],
        ascending, the inputs whose drafts are wanted. Returns their logits, [n, vocab], valid until the next
        call."""
        ...

    def again(self, token_ids: Int64Array, going: Int64Array) -> Tensor:
        """Draft behind the drafts of the last call. going: [m], ascending, which of those go on; token_ids: [m],
        what was drawn for them. Returns logits, [m, vocab], valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class StepStates:
    """The results of a forward, valid until the slot's next forward.

    logits: returns [O, vocab], in float32 or the model's type. sides: makes the side outputs, by name: sampled
    tokens, int [O] -> an array [O, ...]. head: of a model with one that drafts. All must be called in stream
    order. likeliest: int64 [O], the tokens with the largest logits, if the forward has found them."""

    logits: Callable[[], Tensor]
    sides: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    head: DraftingHead | None = None
    likeliest: Tensor | None = None


def lay_out(batch: StepBatch, adapters: Int32Array) -> StepInputs:
    """The inputs of a batch. `token_ids` and `values` are copies: the CPU executor writes pending ones into
    them."""
    if batch.kind == "decode":
        return _lay_out_decode(batch, adapters)
    starts, lengths, outputs = batch.starts, batch.lengths, batch.outputs
    ends = np.cumsum(lengths)
    first = ends - lengths
    known = batch.pending != PENDING
    rows, token_ids = batch.rows.astype(np.int64), batch.token_ids.astype(np.int64)
    every = np.arange(len(token_ids))
    positions = every + (starts - first).repeat(lengths)
    outputs_at = every if outputs.sum() == len(every) else ragged_arange(ends - outputs, outputs)
    wanted, sampled, scored = outputs_at, None, None
    if batch.scored is not None:
        wanted = np.union1d(outputs_at, batch.scored.inputs)
        sampled, scored = np.searchsorted(wanted, outputs_at), np.searchsorted(wanted, batch.scored.inputs)
    if FEATURES in batch.kept:
        token_ids[token_ids == IMAGE] = 0  # features stand in the place of their embeddings
    return StepInputs(
        kind=batch.kind,
        rows=rows.repeat(lengths),
        positions=positions,
        token_ids=token_ids,
        pending_inputs=first[batch.token_ids[first] == PENDING],
        output_inputs=wanted,
        known_pending_rows=batch.rows[known].astype(np.int64),
        known_pending=batch.pending[known].astype(np.int64),
        batch_rows=rows,
        starts=starts,
        lengths=lengths,
        adapters=adapters,
        pages=batch.pages,
        values=values.copy() if (values := batch.side_inputs.get(VALUES)) is not None else None,
        types=types.astype(np.int64) if (types := batch.side_inputs.get(TYPES)) is not None else None,
        known_values=next_values[known] if (next_values := batch.pending_sides.get(VALUES)) is not None else None,
        limits=None if batch.regions is None else _limits(batch, positions, first),
        rotary=None if batch.rotary is None else batch.rotary.astype(np.int64),
        states=batch.states,
        sampled=sampled,
        scored=scored,
        of_tokens=batch.of_tokens,
        unpooled=batch.unpooled,
    )


def _limits(batch: StepBatch, positions: Int64Array, first: Int32Array) -> Int64Array:
    """`StepInputs.limits`. Inputs of a bidirectional region see all positions up to the region's end."""
    limits = positions + 1
    for i, begin, end in cast(Int32Array, batch.regions).tolist():
        inside = np.arange(first[i], first[i] + batch.lengths[i])
        inside = inside[(positions[inside] >= begin) & (positions[inside] < end)]
        limits[inside] = end
    return limits


def _lay_out_decode(batch: StepBatch, adapters: Int32Array) -> StepInputs:
    """`lay_out` for a decode, where each row has one position, one output and a pending input."""
    rows, every = batch.rows.astype(np.int64), np.arange(batch.size)
    return StepInputs(
        kind=batch.kind,
        rows=rows,
        positions=batch.starts.astype(np.int64),
        token_ids=batch.token_ids.astype(np.int64),
        pending_inputs=every,
        output_inputs=every,
        known_pending_rows=_NONE,
        known_pending=_NONE,
        batch_rows=rows,
        starts=batch.starts,
        lengths=batch.lengths,
        adapters=adapters,
        pages=batch.pages,
        states=batch.states,
    )
