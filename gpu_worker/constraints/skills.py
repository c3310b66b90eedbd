"""An adapter from skills to the constraint interface of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from gpu_worker.constraints.state import Int32Array, SkillState, set_bits, set_first_bits


class SkillConstraint:
    """The constraint of `skill` at the start of its output. `vocab_size` limits the mask where any token is
    allowed.

    A rollback replays from the start: skills answer in a few dozen tokens and rarely use speculation.
    """

    __slots__ = ("_eos", "_skill", "_start", "_steps", "_vocab_size")

    def __init__(self, skill: SkillState, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._start = skill.fork()
        self._skill = skill
        self._steps: list[tuple[int, tuple[float, ...]]] = []
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size

    @property
    def finished(self) -> bool:
        allowed = self._skill.allowed_token_ids()
        return allowed is not None and self._eos.issuperset(allowed)

    def fill_mask(self, out: Int32Array) -> None:
        allowed = self._skill.allowed_token_ids()
        if allowed is None:
            set_first_bits(out, self._vocab_size)
        else:
            set_bits(out, allowed)

    def consume(self, token_id: int, values: Sequence[float] = ()) -> bool:
        allowed = self._skill.allowed_token_ids()
        if allowed is not None and token_id not in allowed:
            return False
        self._skill.consume_step(token_id, values)
        self._steps.append((token_id, tuple(values)))
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self._steps), "more than was consumed"
        del self._steps[len(self._steps) - n :]
        self._skill = self._start.fork()
        for token_id, values in self._steps:
            self._skill.consume_step(token_id, values)

    def fork(self) -> Self:
        copy = type(self)(self._start, self._eos, self._vocab_size)
        copy._skill = self._skill.fork()
        copy._steps = list(self._steps)
        return copy

    def finalize(self) -> Any:
        """The skill's answer."""
        return self._skill.finalize()
