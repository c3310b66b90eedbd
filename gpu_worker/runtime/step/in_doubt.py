"""Rows in doubt: a step of theirs is launched while an earlier one verifies drafts of them.

The host plans such a step for the case that all drafts are accepted. In stream order, once the earlier step has
been sampled, `settled` puts what is true in the plan's place. p: the pending input, x y z: the earlier drafts, of
which here two are accepted, u v: the drafts of this step.

    planned                start 14    inputs p u v
    settled                start 13    inputs p u v
    a model with states    start 11    inputs x y p u v     x began at 11, and the state before it is kept

All that follows from starts, lengths and inputs, such as positions, noise and penalties, is made of the settled
batch, on the same path as that of any other batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from petiole.gpu_worker.runtime.interface import DRAFTED, Int32Array, Int64Array, KeptInput, StepBatch


class RowsInDoubt:
    """What verifications leave to their rows' next steps. All methods run in stream order, on a CPU.

    drafts: int64 [rows, n], what the runtime drafted behind each row's pending input. repeats: whether rows with
    rejected drafts go back to the state before them."""

    def __init__(self, n_rows: int, n_drafts: int, *, repeats: bool) -> None:
        self.drafts = np.zeros((n_rows, n_drafts), np.int64)
        self._starts = np.zeros(n_rows, np.int64)
        self._repeats = repeats
        self._repeated: dict[int, Int32Array] = {}

    def note(self, batch: StepBatch, token_ids: Int32Array, accepted: Int32Array) -> None:
        """Note where the rows of a settled verification end. See `StepOutput`."""
        before = batch.starts + batch.lengths - batch.outputs
        starts = before + accepted
        if self._repeats:
            first = np.cumsum(batch.outputs) - batch.outputs
            for i, row in enumerate(batch.rows.tolist()):
                self._repeated.pop(row, None)
                if accepted[i] < batch.outputs[i]:
                    starts[i] = before[i] + 1
                    self._repeated[row] = token_ids[first[i] : first[i] + accepted[i] - 1]
        self._starts[batch.rows] = starts

    def settled(self, batch: StepBatch, pending: Int64Array) -> StepBatch:
        """The batch with its true starts, lengths and drafts. pending: int64 [rows], the pending inputs."""
        first = np.cumsum(batch.lengths) - batch.lengths
        token_ids = self._with_drafts(batch, first)
        if batch.in_doubt is None:
            return replace(batch, token_ids=token_ids)
        rows, open_rows = batch.rows, np.flatnonzero(batch.in_doubt)
        starts = batch.starts.copy()
        starts[open_rows] = self._starts[rows[open_rows]]
        repeated = {i: again for i in open_rows.tolist() if len(again := self._repeated.get(int(rows[i]), ()))}
        counts = np.zeros(len(rows), np.int32)
        for i, again in repeated.items():
            counts[i] = len(again)
            token_ids[first[i]] = pending[rows[i]]
        lengths = batch.lengths + counts
        if repeated:
            token_ids = np.insert(token_ids, first.repeat(counts), np.concatenate([*repeated.values()]))
        return _moved(
            replace(batch, starts=starts, lengths=lengths, token_ids=token_ids, in_doubt=None), batch, counts
        )

    def _with_drafts(self, batch: StepBatch, first: Int64Array) -> Int32Array:
        """The inputs, with the runtime's drafts. first: int64 [B], the first input of each row."""
        token_ids, at = batch.token_ids.copy(), np.flatnonzero(batch.token_ids == DRAFTED)
        if len(at):
            of = np.arange(batch.size).repeat(batch.lengths)[at]
            token_ids[at] = self.drafts[batch.rows[of], at - first[of] - 1]
        return token_ids


def is_open(batch: StepBatch) -> bool:
    """Whether the host does not know all starts, lengths and inputs of a batch, pending ones aside."""
    return batch.in_doubt is not None or bool((batch.token_ids == DRAFTED).any())


def _moved(settled: StepBatch, planned: StepBatch, counts: Int32Array) -> StepBatch:
    """What refers to inputs and positions, after `counts` inputs were put before the first one of each row."""
    if counts.any():
        assert not settled.side_inputs, "a model with states takes no values beside its tokens"
        kind = "verify" if settled.kind == "decode" else settled.kind
        place = np.arange(len(planned.token_ids)) + np.cumsum(counts).repeat(planned.lengths)
        kept = {name: _placed(parts, place) for name, parts in settled.kept.items()}
        settled = replace(settled, kind=kind, kept=kept)
        if (scored := settled.scored) is not None:
            settled = replace(settled, scored=replace(scored, inputs=place[scored.inputs].astype(np.int32)))
    if settled.states is not None:
        certain = (settled.starts + settled.certain)[settled.outputs > 1]
        settled = replace(settled, states=replace(settled.states, certain=certain))
    if settled.rotary is not None:
        settled = replace(settled, rotary=_rotary(settled.rotary, settled, planned, counts))
    return settled


def _placed(parts: Sequence[KeptInput], place: Int64Array) -> list[KeptInput]:
    return [replace(part, at=int(place[part.at])) for part in parts]


def _rotary(rotary: Int32Array, settled: StepBatch, planned: StepBatch, counts: Int32Array) -> Int32Array:
    """Rows in doubt have no images, so that their rotary positions are their positions."""
    first = np.cumsum(planned.lengths) - planned.lengths
    rotary = np.insert(rotary, first.repeat(counts), 0, axis=-1)
    assert planned.in_doubt is not None
    ends = np.cumsum(settled.lengths)
    for i in np.flatnonzero(planned.in_doubt).tolist():
        n = int(settled.lengths[i])
        rotary[..., ends[i] - n : ends[i]] = np.arange(settled.starts[i], settled.starts[i] + n)
    return rotary
