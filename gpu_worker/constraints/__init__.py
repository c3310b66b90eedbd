"""Output constraints: JSON schemas, regular expressions, choices, grammars and skills."""

from gpu_worker.constraints.compile import compile_constraint, warm_up
from gpu_worker.constraints.masks import fill_draft_masks, fill_masks
from gpu_worker.constraints.skills import SkillConstraint
from gpu_worker.constraints.state import ConstraintState, SkillState

__all__ = [
    "ConstraintState",
    "SkillConstraint",
    "SkillState",
    "compile_constraint",
    "fill_draft_masks",
    "fill_masks",
    "warm_up",
]
