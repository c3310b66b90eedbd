"""The states of layers, and what a step does with them.

A state belongs to a row, which a step advances by its positions. Behind positions that the step names, the state
is copied to a snapshot. So the positions of a row fall into spans that end where a copy is made; rows with a
single position, as in a decode, share a span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of a layer, by *place*: of all rows, then snapshots. inputs: [places, kernel - 1, channels],
    the last inputs of its convolution. matrices: float32 [places, heads, key_dim, value_dim], of a delta net. Code
    that computes layers itself may order the numbers of a place in its own way."""

    inputs: Tensor
    matrices: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inputs,) if self.matrices is None else (self.inputs, self.matrices)


@dataclass(frozen=True, slots=True)
class Span:
    """The next positions of n rows, equally many of each. places: int64 [n], of the rows' states. at: int64 [n,
    positions], which of the step's T positions they are. copied: int64 [k], which of the n states are copied
    after the span; copies: int64 [k], to which places."""

    places: Tensor
    at: Tensor
    copied: Tensor
    copies: Tensor

    def put(self, state: Tensor, new: Tensor) -> None:
        """Store the new states of the rows, and their copies."""
        state[self.places] = new
        if len(self.copies):
            state[self.copies] = new[self.copied]


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """layers: of each layer of the model; None: it keeps no state. spans: of one row in the order of positions.
    progress: called for each span of a layer."""

    layers: Sequence[LayerState | None]
    spans: Sequence[Span]
    progress: Callable[[], None]
