"""A step's inputs, laid out on the host when it is launched.

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
from gpu_worker.runtime.interface import PENDING, Float32Array, Int32Array, StepBatch, StepKind

Int64Array = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """rows, positions, token_ids: [T], PENDING where a token comes from its row's pending buffer; pending_inputs:
    where that is; output_inputs: [O]; known_pending: [B'] rows and what to write to their pending buffers, and
    `pending_values` beside it; adapters: [B], the adapter slot of each sequence; values: as in `StepBatch`."""

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
    values: Float32Array | None = None
    pending_values: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a forward leaves for sampling, until the slot's next forward.

    hidden: [O, hidden], of the outputs; only where the model decodes values. logits: gives float32 [O, vocab], to
    be called in stream order.
    """

    hidden: Tensor
    logits: Callable[[], Tensor]


def lay_out(batch: StepBatch, adapters: Int32Array) -> StepInputs:
    """`token_ids` is a copy: who runs the step writes the pending ones into it."""
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
        values=batch.values,
        pending_values=None if batch.pending_values is None else batch.pending_values[known],
    )


def _lay_out_decode(batch: StepBatch, adapters: Int32Array) -> StepInputs:
    """The same where each row has one position, one output and a pending input."""
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
    )
