"""What the scheduler knows of a constraint: one protocol for grammars and for skills.

A state stands at one point of the output. It says which tokens may come next, goes on by a token, and goes back.
The mask of a position may be asked for only when everything before it has been consumed; that is why a constrained
sequence's sampling waits for the commit of its earlier steps, and its forward does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class ConstraintState(Protocol):
    """Owned by one thread at a time; not shared between sequences."""

    @property
    def finished(self) -> bool:
        """Nothing but EOS may follow."""
        ...

    def fill_mask(self, out: Int32Array) -> None:
        """Write all of `out`, int32 [ceil(vocab / 32)]: bit v % 32 of word v // 32 is set when token v is allowed.
        EOS is allowed exactly where the output may end; ids that no token has are never allowed. Raises
        InvalidRequest when the constraint turns out too complex to go on with."""
        ...

    def consume(self, token_id: int) -> bool:
        """Go on by a token. False, and nothing has changed, when it is not allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Take back the last `n` consumed tokens."""
        ...

    def fork(self) -> Self:
        """An independent copy of this point."""
        ...


class SkillState(Protocol):
    """A skill (point, detect) that steers its own output: the tokens that may come, what came, what it means."""

    def allowed_token_ids(self) -> Sequence[int] | None:
        """The tokens that may come next; None: any."""
        ...

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> None:
        """A token that was allowed, with what the model decoded beside it (a coordinate, a size)."""
        ...

    def finalize(self) -> Any:
        """The skill's answer, as JSON data, from what has been consumed."""
        ...

    def fork(self) -> Self:
        """An independent copy."""
        ...


def set_bits(out: Int32Array, token_ids: Sequence[int]) -> None:
    """Set exactly these bits, and clear all others."""
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
