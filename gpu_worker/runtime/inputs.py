"""The arrays of a step, prepared on the host at launch.

rows     [B]  7          3             5
starts   [B]  12         0             40
lengths  [B]  1          4             3
inputs   [T]  p          a  b  c  d    p  x  y       p: the row's pending token
position [T]  12         0  1  2  3    40 41 42
outputs  [B]  1          1             3
last     [O]  0          4             5  6  7       inputs whose logits are sampled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cache import ragged_arange
from gpu_worker.runtime.interface import PENDING, Float32Array, Int32Array, PageUpdates, StepBatch, StepKind

Int64Array = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """rows, positions, token_ids: [T]; PENDING if a token comes from its row's pending buffer. pending_inputs: the
    indices of those. output_inputs: [O], indices of the inputs whose logits are sampled. known_pending_rows,
    known_pending, pending_values: [B'], next inputs to write to the pending buffers of these rows. batch_rows,
    starts, lengths: [B], and pages, values: as in `StepBatch`. adapters: [B], each sequence's slot."""

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
    values: Float32Array | None = None
    pending_values: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class StepStates:
    """The results of a forward, valid until the slot's next forward.

    hidden: [O, hidden]; used only by models that decode values. logits: returns float32 [O, vocab]; must be called
    in stream order.
    """

    hidden: Tensor
    logits: Callable[[], Tensor]


def lay_out(batch: StepBatch, adapters: Int32Array) -> StepInputs:
    """The inputs of a batch. `token_ids` is a copy, because the CPU executor writes the pending tokens into it."""
    if batch.kind == "decode":
        return _lay_out_decode(batch, adapters)
    starts, lengths, outputs = batch.starts, batch.lengths, batch.outputs
    ends = np.cumsum(lengths)
    first = ends - lengths
    known = batch.pending != PENDING
    return StepInputs(
        kind=batch.kind,
        rows=np.repeat(batch.rows, lengths).astype(np.int64),
        positions=ragged_arange(starts, lengths),
        token_ids=batch.token_ids.astype(np.int64),
        pending_inputs=first[batch.token_ids[first] == PENDING].astype(np.int64),
        output_inputs=ragged_arange(ends - outputs, outputs),
        known_pending_rows=batch.rows[known].astype(np.int64),
        known_pending=batch.pending[known].astype(np.int64),
        batch_rows=batch.rows.astype(np.int64),
        starts=starts,
        lengths=lengths,
        adapters=adapters,
        pages=batch.pages,
        values=batch.values,
        pending_values=None if batch.pending_values is None else batch.pending_values[known],
    )


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
    )
