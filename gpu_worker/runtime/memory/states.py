"""The states of layers that keep one: a pool beside the KV pools.

    place   0        rows     2 rows
            |- rows -|- kept -|- snapshots -|         kept: with drafts alone

The state of a row stands at the row's number, that of snapshot c behind all rows. Snapshots may be rounded. The
pool knows how far each row's state has come: a step must begin there, so no position changes a state twice. A
verification keeps the state before its drafts. If the row's next step begins there, drafts were rejected, and the
row goes back to that state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from petiole.gpu_worker.models.parts.recurrent.states import RUN, LayerState, Rounded, Span, StepBySpans
from petiole.gpu_worker.models.plan import ModelPlan, Recurrent
from petiole.gpu_worker.models.weights.host_memory import new_zeros
from petiole.gpu_worker.runtime.device.device import upload
from petiole.gpu_worker.runtime.interface import Int32Array, Int64Array, Progress, StateUpdates


@dataclass(frozen=True, slots=True)
class StatePool:
    """layers: of each layer of the model; None: it keeps no state. reached: int64 [rows], the positions that each
    row's state has seen; before: int64 [rows], those that its kept state has seen, -1: it keeps none; empty: no
    row does. snapshots: how many, with the reserved one."""

    layers: tuple[LayerState | None, ...]
    reached: Int64Array
    before: Int64Array
    snapshots: int

    def advance(
        self, rows: Int64Array, starts: Int32Array, lengths: Int32Array, updates: StateUpdates, progress: Progress
    ) -> StepBySpans:
        """Begin the rows that begin, and prepare a step of these rows in torch."""
        self.begin(rows, starts, lengths, updates)
        spans = _spans(rows, starts, lengths, *self._copies(rows, updates))
        return StepBySpans(self.layers, list(spans), progress)

    def begin(
        self, rows: Int64Array, starts: Int32Array, lengths: Int32Array, updates: StateUpdates
    ) -> Int64Array | None:
        """Begin the rows that begin, in stream order. Returns the place to which the states after each of the
        step's T positions are copied, or -1; None if there are no copies. Whoever calls this advances the
        states."""
        going_on = updates.sources > 0
        self.reached[updates.begun] = updates.starts
        own = [layer for layer in self.layers if layer is not None]
        if not going_on.all():
            fresh = upload(updates.begun[~going_on].astype(np.int64), own[0].device)
            for layer in own:
                layer.clear(fresh)
        if going_on.any():
            pairs = np.stack([updates.begun, self._first_snapshot + updates.sources])[:, going_on]
            later, places = upload(pairs.astype(np.int64), own[0].device)
            for layer in own:
                layer.restore(later, places)
        if len(self.before):
            self.before[updates.begun] = -1
            self._go_back(rows[self.reached[rows] != starts], own)
        assert (self.reached[rows] == starts).all(), "a state is not where its step begins"
        self.reached[rows] += lengths
        of, positions, to = self._copies(rows, updates)
        self.before[rows[updates.undecided]] = updates.certain
        if not len(of):
            return None
        copies = np.full(int(lengths.sum()), -1, dtype=np.int64)
        ends = (np.cumsum(lengths) - lengths)[of] + positions - starts[of]
        copies[ends - 1] = to
        return copies

    @property
    def _first_snapshot(self) -> int:
        return len(self.reached) + len(self.before)

    def _go_back(self, rows: Int64Array, own: Sequence[LayerState]) -> None:
        """Let rows go on from their kept states."""
        if not len(rows):
            return
        self.reached[rows] = self.before[rows]
        later, places = upload(np.stack([rows, len(self.reached) + rows]), own[0].device)
        for layer in own:
            layer.copy(later, places)

    def _copies(self, rows: Int64Array, updates: StateUpdates) -> tuple[Int64Array, Int64Array, Int64Array]:
        """What is copied in a step of these rows: of which sequence, after which position, to which place."""
        of = np.concatenate([updates.kept, updates.undecided]).astype(np.int64)
        positions = np.concatenate([updates.positions, updates.certain]).astype(np.int64)
        to = np.concatenate(
            [self._first_snapshot + updates.snapshots, len(self.reached) + rows[updates.undecided]]
        )
        return of, positions, to.astype(np.int64)


def new_state_pool(
    plan: ModelPlan,
    *,
    rows: int,
    snapshots: int,
    dtype: torch.dtype,
    device: torch.device,
    rounded: bool = False,
    drafts: bool = False,
) -> StatePool | None:
    """None if no layer keeps a state. rounded: the matrices of snapshots are in eight bits. drafts: each row may
    keep the state before some."""
    own = dict(plan.recurrent)
    if not own:
        return None
    before = np.full(rows if drafts else 0, -1, dtype=np.int64)
    exact = rows + len(before)

    def layer(mixer: Recurrent) -> LayerState:
        inputs = new_zeros((exact + snapshots, mixer.kernel - 1, mixer.channels), dtype, device)
        if mixer.matrices is None:
            return LayerState(inputs)
        if not rounded:
            return LayerState(inputs, new_zeros((exact + snapshots, *mixer.matrices), torch.float32, device))
        numbers = int(np.prod(mixer.matrices))
        codes = new_zeros((snapshots, numbers), torch.int8, device)
        scales = new_zeros((snapshots, numbers // RUN), torch.float32, device)
        return LayerState(
            inputs, new_zeros((exact, *mixer.matrices), torch.float32, device), Rounded(codes, scales)
        )

    layers = tuple(layer(own[i]) if i in own else None for i in range(plan.n_layers))
    return StatePool(layers, np.zeros(rows, dtype=np.int64), before, snapshots)


def state_bytes(plan: ModelPlan, bytes_per_element: int, *, rounded: bool = False) -> int:
    """Bytes of the states of one row, or of a snapshot, in all layers. rounded: of a snapshot whose matrices are
    in eight bits."""
    total = 0
    for _, mixer in plan.recurrent:
        total += (mixer.kernel - 1) * mixer.channels * bytes_per_element
        numbers = 0 if mixer.matrices is None else int(np.prod(mixer.matrices))
        total += numbers + 4 * (numbers // RUN) if rounded else 4 * numbers
    return total


def _spans(
    rows: Int64Array,
    starts: Int32Array,
    lengths: Int32Array,
    of: Int64Array,
    positions: Int64Array,
    to: Int64Array,
) -> Iterator[Span]:
    """Rows with one position share a span. The others have spans of their own, which end where a copy is made. of,
    positions, to: the copies."""
    first = np.cumsum(lengths) - lengths
    kept: dict[int, list[tuple[int, int]]] = {}
    for i, position, place in zip(of.tolist(), positions.tolist(), to.tolist(), strict=True):
        kept.setdefault(i, []).append((position - int(starts[i]), place))
    alone = np.flatnonzero(lengths == 1)
    if len(alone):
        copies = [(k, kept[i][0][1]) for k, i in enumerate(alone.tolist()) if i in kept]
        yield _span(rows[alone], first[alone][:, None], copies)
    for i in np.flatnonzero(lengths > 1).tolist():
        begin, row = int(first[i]), rows[i : i + 1]
        ends = dict(kept.get(i, ()))
        at = 0
        for end in sorted({*ends, int(lengths[i])}):
            copies = [(0, ends[end])] if end in ends else []
            yield _span(row, np.arange(begin + at, begin + end)[None, :], copies)
            at = end


def _span(rows: Int64Array, at: Int64Array, copies: Sequence[tuple[int, int]]) -> Span:
    pairs = torch.tensor(copies, dtype=torch.int64).view(-1, 2)
    return Span(torch.from_numpy(rows), torch.from_numpy(at), pairs[:, 0], pairs[:, 1])
