"""A gated delta net (`plan.DeltaNet`)."""

from __future__ import annotations

from torch import Tensor

from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import is_plain, weight_of
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights, part_of
from petiole.gpu_worker.models.parts.recurrent.states import RecurrentStep
from petiole.gpu_worker.models.plan import DeltaNet


def delta_net(
    plan: DeltaNet, weights: DeltaNetWeights, i: int, x: Tensor, step: RecurrentStep, kernels: Kernels
) -> Tensor:
    """Layer i: [T, hidden] -> [T, hidden]. Advances the states of the step's rows."""
    assert is_plain(plan.norm, weights.norm)
    projected = weights.inputs(x)
    outputs = step.apply_delta_rule(i, plan, weights, projected, weights.gates(x))
    z = part_of(projected, plan.parts["z"], plan.key_heads)
    gated = kernels.gated_rms_norm(outputs, z, weight_of(weights.norm), plan.norm.eps)
    return weights.out(gated.flatten(1))
