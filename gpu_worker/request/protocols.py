"""The interface of constraints, for grammars and for skills.

A state represents one position in the output. It computes the mask of the next token, consumes tokens and rolls
back. The mask of a position requires that all earlier tokens have been consumed. Therefore the sampling of a
constrained sequence waits for the commit of its earlier steps; its forward does not. The masks of a positional
skill (`SkillConstraint` and `PositionalConstraint` in `skills.py`) require nothing, and nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class ConstraintState(Protocol):
    """The constraint state of one sequence. Used by one thread at a time."""

    @property
    def finished(self) -> bool:
        """Whether only EOS may follow."""
        ...

    def fill_mask(self, out: Int32Array) -> None:
        """Write all of `out`, int32 [ceil(vocab / 32)]: bit v % 32 of word v // 32 is set when token v is allowed.
        EOS is allowed exactly where the output may end; unused ids are never allowed. Raises InvalidRequest if the
        constraint is too complex to continue."""
        ...

    def consume(self, token_id: int) -> bool:
        """Advance by a token. Returns False, with nothing changed, if it is not allowed. Raises `InvalidRequest`
        if it is allowed and the constraint cannot go on."""
        ...

    def rollback(self, n: int) -> None:
        """Undo the last `n` consumed tokens."""
        ...

    def fork(self) -> Self:
        """An independent copy of this state."""
        ...


class SkillState(Protocol):
    """The state of a skill (point, detect), which restricts its output tokens and computes an answer from them."""

    def allowed_token_ids(self) -> Sequence[int] | None:
        """The allowed next tokens; None: any."""
        ...

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> Mapping[str, float] | None:
        """Consume an allowed token, with what it carries (`request.values`).
        Returns what it completes: a point or a box of the answer."""
        ...

    def finalize(self) -> Any:
        """The skill's answer from the consumed tokens, as JSON data."""
        ...

    def fork(self) -> Self:
        """An independent copy."""
        ...


class PositionalSkill(Protocol):
    """A skill whose allowed tokens depend on the output index alone. Its masks wait for no commit."""

    def allowed_at(self, index: int) -> Sequence[int] | None:
        """The allowed tokens at this index of the output; None: any."""
        ...

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> Mapping[str, float] | None:
        """As `SkillState.consume_step`."""
        ...

    def finalize(self) -> Any:
        """As `SkillState.finalize`."""
        ...

    def fork(self) -> Self:
        """An independent copy."""
        ...


def set_bits(out: Int32Array, token_ids: Sequence[int]) -> None:
    """Set the bits of these tokens, and clear all others."""
    out.fill(0)
    ids = np.asarray(token_ids, dtype=np.int64)
    bits = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
    np.bitwise_or.at(out.view(np.uint32), ids // 32, bits)


def set_first_bits(out: Int32Array, count: int) -> None:
    """Set the bits of tokens 0 to `count` - 1, and clear all others."""
    words, rest = divmod(count, 32)
    out[:words] = -1
    out[words:] = 0
    if rest:
        out.view(np.uint32)[words] = (1 << rest) - 1
