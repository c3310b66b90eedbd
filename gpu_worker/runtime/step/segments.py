"""A step's inputs, cut into segments. The queries of a segment see keys in the same way.

    row        | before |     region     |  tail  |
    segments     causal   bidirectional    causal

A query of a bidirectional region sees all keys up to the region's end. Every other query sees the keys up to
itself. The step's own keys are stored before any query attends, so a segment need only know where its keys end.
Inputs of regions are put first, so each kind is one run of queries, and nothing is gathered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from petiole.gpu_worker.runtime.interface import Int32Array, Int64Array
from petiole.gpu_worker.runtime.step.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Run:
    """Segments of one kind. rows: int64 [S], rows of the page table; ends: int32 [S], where the segments' keys
    end; lengths: int32 [S]. The queries of a segment are the positions from `end - length` on."""

    rows: Int64Array
    ends: Int32Array
    lengths: Int32Array

    @property
    def n_queries(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Segmented:
    """A step's inputs in the order of its segments. adapters: int32 [T], each input's slot."""

    inputs: StepInputs
    adapters: Int32Array
    bidirectional: Run
    causal: Run


def segmented(inputs: StepInputs) -> Segmented:
    adapters = np.repeat(inputs.adapters, inputs.lengths)
    if inputs.limits is None:
        causal = Run(inputs.batch_rows, inputs.starts + inputs.lengths, inputs.lengths)
        return Segmented(inputs, adapters, _select(causal, slice(0)), causal)
    rows, ends, lengths, bidirectional = _segments(inputs, inputs.limits)
    every = Run(rows, ends, lengths)
    inside = np.repeat(bidirectional, lengths)
    order = np.concatenate([np.flatnonzero(inside), np.flatnonzero(~inside)])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ordered = replace(
        inputs,
        rows=inputs.rows[order],
        positions=inputs.positions[order],
        token_ids=inputs.token_ids[order],
        pending_inputs=place[inputs.pending_inputs],
        output_inputs=place[inputs.output_inputs],
        values=None if inputs.values is None else inputs.values[order],
        limits=inputs.limits[order],
        rotary=None if inputs.rotary is None else inputs.rotary[..., order],
        kept={name: [(int(place[at]), part) for at, part in parts] for name, parts in inputs.kept.items()},
    )
    runs = _select(every, bidirectional), _select(every, ~bidirectional)
    return Segmented(ordered, adapters[order], *runs)


def _segments(
    inputs: StepInputs, limits: Int64Array
) -> tuple[Int64Array, Int32Array, Int32Array, npt.NDArray[np.bool_]]:
    """(rows, ends, lengths, whether bidirectional): [S]. Inputs of one region see keys up to the same end.
    Elsewhere each input sees one key more than the previous one."""
    same_row = np.repeat(np.arange(len(inputs.lengths)), inputs.lengths)
    same_row = same_row[1:] == same_row[:-1]
    together = same_row & (limits[1:] == limits[:-1])
    inside = limits > inputs.positions + 1
    inside[1:] |= together
    begins = np.ones(len(limits), np.bool_)
    begins[1:] = ~same_row | (inside[1:] != inside[:-1]) | (inside[1:] & ~together)
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=len(limits))
    ends = limits[first + lengths - 1]
    return inputs.rows[first], ends.astype(np.int32), lengths.astype(np.int32), inside[first]


def _select(run: Run, which: slice | npt.NDArray[np.bool_]) -> Run:
    return Run(run.rows[which], run.ends[which], run.lengths[which])
