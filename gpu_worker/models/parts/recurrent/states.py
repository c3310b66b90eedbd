"""The states of layers, and what a step does with them.

A state belongs to a row, which a step advances by its positions. Behind positions that the step names, the state
is copied to a snapshot.

`StepBySpans` is the reference, in torch: the positions of a row fall into spans that end where a copy is made.
Rows with a single position, as in a decode, share a span.

The matrices of snapshots may be rounded to eight bits (`Rounded`): then 3.6 times as many fit into a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.delta_inputs import (
    DeltaNetWeights,
    convolution_inputs,
    rule_gates,
    rule_heads,
)
from petiole.gpu_worker.models.parts.recurrent.delta_rule import delta_rule
from petiole.gpu_worker.models.parts.recurrent.scan import scan
from petiole.gpu_worker.models.plan import DeltaNet

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

    def read(self, snapshots: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, numbers]."""
        codes = self.codes[snapshots]
        return (codes.view(len(codes), -1, RUN) * self.scales[snapshots][..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of a layer, by *place*: of all rows, then snapshots. inputs: [places, kernel - 1, channels],
    the last inputs of its convolution. matrices: float32 [places, heads, key_dim, value_dim], if it has some; of
    none but rows if those of snapshots are `rounded`. Code that computes layers itself may order the numbers of a
    place in its own way, in runs of `RUN`."""

    inputs: Tensor
    matrices: Tensor | None = None
    rounded: Rounded | None = None

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def clear(self, rows: Tensor) -> None:
        """Let rows, int64 [n], begin from nothing."""
        self.inputs[rows] = 0
        if self.matrices is not None:
            self.matrices[rows] = 0

    def restore(self, rows: Tensor, places: Tensor) -> None:
        """Let rows go on from the snapshots at these places: int64 [n] each."""
        if self.matrices is None or self.rounded is None:
            self.copy(rows, places)
            return
        self.inputs[rows] = self.inputs[places]
        self.matrices[rows] = self.rounded.read(places - len(self.matrices)).view(-1, *self.matrices.shape[1:])

    def copy(self, rows: Tensor, places: Tensor) -> None:
        """Let rows go on from the states at these places, which are not rounded."""
        self.inputs[rows] = self.inputs[places]
        if self.matrices is not None:
            self.matrices[rows] = self.matrices[places]

    def put_inputs(self, span: Span, inputs: Tensor) -> None:
        """Store the new inputs of the rows of a span, and their copies."""
        self.inputs[span.places] = inputs
        self.inputs[span.copies] = inputs[span.copied]

    def put_matrices(self, span: Span, matrices: Tensor) -> None:
        assert self.matrices is not None
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


class RecurrentStep(Protocol):
    """Advances the states of a step's rows by its T positions, layer by layer."""

    def convolve(self, i: int, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Layer i's convolution over its stored inputs and x [T, channels]: float32 [T, channels]. kernel:
        [channels, kernel]; bias: [channels]."""
        ...

    def apply_delta_rule(
        self, i: int, plan: DeltaNet, weights: DeltaNetWeights, projected: Tensor, gates: Tensor
    ) -> Tensor:
        """Layer i's convolution and delta rule: float32 [T, value_heads, value_dim], contiguous. projected, gates:
        [T, outputs] of the projections of the inputs and of the gates."""
        ...

    def scan(self, i: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """Layer i's scan, float32 [T, heads, width]. Shapes as in `scan.scan`, with T positions in place of n
        rows of some."""
        ...


@dataclass(frozen=True, slots=True)
class StepBySpans:
    """A `RecurrentStep` in torch. layers: of each layer of the model; None: it keeps no state. spans: of one row
    in the order of positions. progress: called for each span of a layer."""

    layers: Sequence[LayerState | None]
    spans: Sequence[Span]
    progress: Callable[[], None]

    def convolve(self, i: int, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        state, mixed = self._of(i), torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for span in self.spans:
            self.progress()
            mixed[span.at], before = convolved(x[span.at], state.inputs[span.places], kernel, bias)
            state.put_inputs(span, before)
        return mixed

    def apply_delta_rule(
        self, i: int, plan: DeltaNet, weights: DeltaNetWeights, projected: Tensor, gates: Tensor
    ) -> Tensor:
        mixed = self.convolve(i, convolution_inputs(plan, projected), weights.convolution)
        (q, k, v), (g, beta) = rule_heads(plan, mixed), rule_gates(plan, weights, gates)
        state, outputs = self._of(i), torch.empty_like(v)
        assert state.matrices is not None
        if plan.each > 1:
            of = torch.arange(plan.value_heads, device=q.device) // plan.run % plan.key_heads
            q, k = q[:, of], k[:, of]
        for span in self.spans:
            self.progress()
            q_, k_, v_, g_, beta_ = (part[span.at] for part in (q, k, v, g, beta))
            outputs[span.at], stored = delta_rule(q_, k_, v_, g_, beta_, state.matrices[span.places])
            state.put_matrices(span, stored)
        return outputs

    def scan(self, i: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        state, outputs = self._of(i), torch.empty_like(v)
        assert state.matrices is not None
        for span in self.spans:
            self.progress()
            q_, k_, v_, g_ = (part[span.at] for part in (q, k, v, g))
            outputs[span.at], stored = scan(q_, k_, v_, g_, state.matrices[span.places])
            state.put_matrices(span, stored)
        return outputs

    def _of(self, i: int) -> LayerState:
        state = self.layers[i]
        assert state is not None, "a layer without its states"
        return state


# ------------------------------------------------------------ the convolution before a state


def convolved(x: Tensor, before: Tensor, kernel: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [n, positions, channels]; before: [n, kernel - 1, channels], the inputs before them; kernel: [channels,
    kernel]. Returns float32 [n, positions, channels], and the inputs before the next positions.

    A sum of as many products as the kernel has numbers, in one order: a position gets the same bits whatever is
    computed with it, and wherever a sequence is cut."""
    n, width = x.shape[1], kernel.shape[1]
    inputs, weights = before.new_empty((len(x), width - 1 + n, x.shape[2])), kernel.float()
    inputs[:, : width - 1], inputs[:, width - 1 :] = before, x
    wide = inputs.float()
    total = wide[:, :n] * weights[:, 0]
    for k in range(1, width):
        total += wide[:, k : k + n] * weights[:, k]
    return total if bias is None else total + bias.float(), inputs[:, n:]
