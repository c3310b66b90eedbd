"""Token masks for the constrained positions of a step."""

from __future__ import annotations

from collections.abc import Sequence

from petiole.gpu_worker.constraints.grammar import GrammarState, fill_grammar_masks
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request.protocols import ConstraintState, Int32Array


def fill_masks(states: Sequence[ConstraintState], out: Int32Array) -> None:
    """Fill `out`, int32 [len(states), words], with the mask of `states[k]` in row k. States are distinct."""
    grammars = []
    for row, state in enumerate(states):
        if isinstance(state, GrammarState):
            grammars.append((row, state))
        else:
            state.fill_mask(out[row])
    fill_grammar_masks(grammars, out)


def fill_draft_masks(state: ConstraintState, drafts: Sequence[int], out: Int32Array) -> int:
    """The masks of a verify: `out` int32 [len(drafts) + 1, words], row k for the position after `drafts[:k]`.

    Returns the number of leading drafts that the constraint allows. Rows after the first disallowed draft are not
    written, because that draft is always rejected; nor are those behind the constraint's end. Nor is the row of a
    place where nothing may come: the request fails when it gets there, and not if the drafts before are rejected.
    The state is restored.
    """
    n_consumed = 0
    try:
        state.fill_mask(out[0])
        for draft in drafts:
            if state.finished or not state.consume(draft):
                return n_consumed
            n_consumed += 1
            try:
                state.fill_mask(out[n_consumed])
            except InvalidRequest:
                out[n_consumed] = 0
                return n_consumed
        return n_consumed
    finally:
        state.rollback(n_consumed)
