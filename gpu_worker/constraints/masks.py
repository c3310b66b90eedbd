"""Masks for the constrained positions of a step."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.constraints.grammar import GrammarState, fill_grammar_masks
from gpu_worker.constraints.state import ConstraintState, Int32Array


def fill_masks(states: Sequence[ConstraintState], out: Int32Array) -> None:
    """`out`: int32 [len(states), words]; row k becomes the mask of `states[k]`. Distinct states."""
    grammars = []
    for row, state in enumerate(states):
        if isinstance(state, GrammarState):
            grammars.append((row, state))
        else:
            state.fill_mask(out[row])
    fill_grammar_masks(grammars, out)


def fill_draft_masks(state: ConstraintState, drafts: Sequence[int], out: Int32Array) -> int:
    """The masks of a verify: `out` int32 [len(drafts) + 1, words], row k for the position after `drafts[:k]`.

    Returns how many leading drafts the constraint allows; the rows behind the first that it does not are not
    written, because that draft is certain to be rejected. The state is where it was.
    """
    taken = 0
    try:
        for draft in drafts:
            state.fill_mask(out[taken])
            if not state.consume(draft):
                return taken
            taken += 1
        state.fill_mask(out[taken])
        return taken
    finally:
        state.rollback(taken)
