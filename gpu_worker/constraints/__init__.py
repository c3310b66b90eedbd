"""Output constraints: JSON schemas, regular expressions, choices, grammars and skills.

Preparation compiles constraints; the scheduler asks for their masks. `protocols` has their interface.

    compiler          turns a request's constraint into the initial state of its sequence
    bans              words that must not come
    budget            a thought that is closed by force
    calls             calls of tools, thoughts and answers as one grammar
    proving           compiles a constraint for the first time, in a child
    _proving_process  what runs there; a job of `children`
    grammar           a compiled grammar and its states, by llguidance; the latest, which are kept; a step's masks
    schema/           JSON schemas as grammars
    skill_states      a skill as a constraint
"""

from petiole.gpu_worker.constraints.bans import BannedState, Bans, spellings
from petiole.gpu_worker.constraints.budget import BudgetState
from petiole.gpu_worker.constraints.compiler import compile_constraint, warm_up
from petiole.gpu_worker.constraints.grammar import fill_draft_masks, fill_masks
from petiole.gpu_worker.constraints.skill_states import PositionalConstraint, SkillConstraint
from petiole.gpu_worker.request.protocols import ConstraintState, PositionalSkill, SkillState

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
