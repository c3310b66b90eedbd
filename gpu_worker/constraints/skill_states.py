"""An adapter from skills to the constraint interface of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy as copy_of
from typing import Any, Self

from petiole.gpu_worker.request.protocols import Int32Array, PositionalSkill, SkillState, set_bits, set_first_bits


class SkillConstraint:
    """The constraint of `skill` at the start of its output. `vocab_size` limits the mask if any token is allowed.

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
        _fill(out, allowed, self._vocab_size)

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
        copy = copy_of(self)
        copy._start = self._start
        copy._skill = self._skill.fork()
        copy._steps = list(self._steps)
        return copy

    def finalize(self) -> Any:
        """The skill's answer."""
        return self._skill.finalize()


class PositionalConstraint(SkillConstraint):
    """The constraint of a positional skill. Its masks need no commit of earlier steps."""

    __slots__ = ("_positional",)

    def __init__(self, skill: PositionalSkill, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        super().__init__(_Counted(skill), eos_token_ids, vocab_size)
        self._positional = skill.fork()

    def fill_mask_at(self, index: int, out: Int32Array) -> None:
        """The mask at this index of the output. It does not depend on the consumed tokens."""
        _fill(out, self._positional.allowed_at(index), self._vocab_size)


class _Counted:
    """A positional skill as a `SkillState`: the index is the number of consumed tokens."""

    __slots__ = ("_index", "_skill")

    def __init__(self, skill: PositionalSkill, index: int = 0) -> None:
        self._skill, self._index = skill, index

    def allowed_token_ids(self) -> Sequence[int] | None:
        return self._skill.allowed_at(self._index)

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> Mapping[str, float] | None:
        self._index += 1
        return self._skill.consume_step(token_id, values)

    def finalize(self) -> Any:
        return self._skill.finalize()

    def fork(self) -> _Counted:
        return _Counted(self._skill.fork(), self._index)


def _fill(out: Int32Array, allowed: Sequence[int] | None, vocab_size: int) -> None:
    if allowed is None:
        set_first_bits(out, vocab_size)
    else:
        set_bits(out, allowed)
