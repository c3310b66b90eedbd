"""A step's states on CUDA: `fused.states` over the rows of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.states import LayerState
from petiole.gpu_worker.models.plan import DeltaNet

if TYPE_CHECKING:
    from petiole.gpu_worker.runtime.cuda.fused.states.fla import RowPart


@dataclass(frozen=True, slots=True)
class StatesOnCuda:
    """A `RecurrentStep`. The host decides nothing, so it can be captured in a graph.

    layers: of each layer of the model; None: it keeps no state. places: [B], of the rows' states; bounds: [B + 1],
    where the positions of each row begin; of: [T], the index of each position's row; copies: [T], the place to
    which the state after it is copied, or -1. All int32. parts: of long rows, if fla-core computes them."""

    layers: Sequence[LayerState | None]
    places: Tensor
    bounds: Tensor
    of: Tensor
    copies: Tensor
    parts: Sequence[RowPart] | None = None

    def convolve(self, i: int, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        from petiole.gpu_worker.runtime.cuda.fused.states.recurrent import convolve

        inputs = self._of(i).inputs
        return convolve(x, kernel, bias, inputs, self.places, self.bounds, self.of, self.copies)

    def apply_delta_rule(
        self, i: int, plan: DeltaNet, weights: DeltaNetWeights, projected: Tensor, gates: Tensor
    ) -> Tensor:
        from petiole.gpu_worker.runtime.cuda.fused.states.chunks import apply_delta_rule_in_chunks
        from petiole.gpu_worker.runtime.cuda.fused.states.recurrent import apply_delta_rule, prepare

        state = self._of(i)
        assert state.matrices is not None
        step = self.places, self.bounds, self.of, self.copies
        read = prepare(plan, weights, projected, gates, state.inputs, *step)
        given = *read, state.matrices, state.rounded, self.places, self.bounds, self.copies
        if self.parts is not None:
            from petiole.gpu_worker.runtime.cuda.fused.states.fla import apply_delta_rule_by_fla

            return apply_delta_rule_by_fla(*given, self.parts, tiled=plan.tiled)
        rule = apply_delta_rule_in_chunks if switch("exact") == "off" else apply_delta_rule
        return rule(*given, tiled=plan.tiled)

    def scan(self, i: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        raise NotImplementedError("executor.require_supported refuses layers with a scan")

    def _of(self, i: int) -> LayerState:
        state = self.layers[i]
        assert state is not None, "a layer without its states"
        return state
