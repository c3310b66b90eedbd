"""Output constraints: JSON schemas, regular expressions, choices, grammars and skills.

Preparation compiles constraints; the scheduler asks for their masks. `protocols` has their interface.

    compile  turns a request's constraint into the initial state of its sequence
    bans     words that must not come
    budget   a thought that is closed by force
    calls    calls of tools, thoughts and answers as one grammar
    grammar  a compiled grammar and its states, by llguidance
    schema/  JSON schemas as grammars
    skills   a skill as a constraint
    masks    the packed masks of a step
"""

from petiole.gpu_worker.constraints.bans import BannedState, Bans, spellings
from petiole.gpu_worker.constraints.budget import BudgetState
from petiole.gpu_worker.constraints.compile import compile_constraint, warm_up
from petiole.gpu_worker.constraints.masks import fill_draft_masks, fill_masks
from petiole.gpu_worker.constraints.skills import PositionalConstraint, SkillConstraint
from petiole.gpu_worker.protocols import ConstraintState, PositionalSkill, SkillState

__all__ = [
    "BannedState",
    "Bans",
    "BudgetState",
    "ConstraintState",
    "PositionalConstraint",
    "PositionalSkill",
    "SkillConstraint",
    "SkillState",
    "compile_constraint",
    "fill_draft_masks",
    "fill_masks",
    "spellings",
    "warm_up",
]
