"""The states of layers, and what a step does with them.

A state belongs to a row, which a step advances by its positions. Behind positions that the step names, the state
is copied to a snapshot. So the positions of a row fall into spans that end where a copy is made; rows with a
single position, as in a decode, share a span.

The matrices of snapshots may be rounded to eight bits (`Rounded`): then 3.6 times as many fit into a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 32
"""Numbers of a rounded matrix that share a scale: neighbours among the dimensions of values."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Matrices of snapshots in eight bits. codes: int8 [snapshots, numbers]; scales: float32 [snapshots, numbers /
    RUN], the largest of a run over 127. A number is off by at most half a scale."""

    codes: Tensor
    scales: Tensor

    def put(self, snapshots: Tensor, matrices: Tensor) -> None:
        """matrices: float32 [snapshots, ...]."""
        runs = matrices.reshape(len(snapshots), -1, RUN)
        scales = runs.abs().amax(-1, keepdim=True) / 127
        codes = (runs / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
        self.codes[snapshots] = codes.flatten(1).to(torch.int8)
        self.scales[snapshots] = scales.squeeze(-1)

    def read(self, snapshot: int, to: Tensor) -> None:
        runs = self.codes[snapshot].view(-1, RUN) * self.scales[snapshot][:, None]
        to.copy_(runs.view(to.shape))


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of a layer, by *place*: of all rows, then snapshots. inputs: [places, kernel - 1, channels],
    the last inputs of its convolution. matrices: float32 [places, heads, key_dim, value_dim], of a delta net; of
    rows alone if those of snapshots are `rounded`. Code that computes layers itself may order the numbers of a
    place in its own way, in runs of `RUN`."""

    inputs: Tensor
    matrices: Tensor | None = None
    rounded: Rounded | None = None

    def begin(self, row: int, place: int | None) -> None:
        """Let a row go on from the snapshot at a place; None: from nothing."""
        self.inputs[row] = 0 if place is None else self.inputs[place]
        if self.matrices is None:
            return
        if place is not None and self.rounded is not None:
            self.rounded.read(place - len(self.matrices), self.matrices[row])
        else:
            self.matrices[row] = 0 if place is None else self.matrices[place]

    def put(self, span: Span, inputs: Tensor, matrices: Tensor | None = None) -> None:
        """Store the new states of the rows of a span, and their copies."""
        self.inputs[span.places] = inputs
        self.inputs[span.copies] = inputs[span.copied]
        if self.matrices is None or matrices is None:
            return
        self.matrices[span.places] = matrices
        if self.rounded is None:
            self.matrices[span.copies] = matrices[span.copied]
        elif len(span.copies):
            self.rounded.put(span.copies - len(self.matrices), matrices[span.copied])


@dataclass(frozen=True, slots=True)
class Span:
    """The next positions of n rows, equally many of each. places: int64 [n], of the rows' states. at: int64 [n,
    positions], which of the step's T positions they are. copied: int64 [k], which of the n states are copied
    after the span; copies: int64 [k], to which places."""

    places: Tensor
    at: Tensor
    copied: Tensor
    copies: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """layers: of each layer of the model; None: it keeps no state. spans: of one row in the order of positions.
    progress: called for each span of a layer."""

    layers: Sequence[LayerState | None]
    spans: Sequence[Span]
    progress: Callable[[], None]
