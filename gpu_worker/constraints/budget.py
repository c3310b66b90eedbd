"""A thought that may have this many tokens, and is closed by force then.

    before   the output may begin a thought, or something else
    inside   the tokens of the thought are counted, up to the mark that closes it. When the budget is used up, the
             tokens of this mark come, one after the other
    behind   all is as without a budget

It stands around another constraint, such as a schema after the thought, or around none. The position follows from
the output's tokens alone. So preemption, resume and drafts need nothing of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from petiole.gpu_worker.request.protocols import ConstraintState, Int32Array, set_bits, set_first_bits

Place = Literal["before", "inside", "behind"]
_LONGEST_CHARACTER = 4
"""Bytes. A character that the budget's end would cut may have its other bytes first."""


@dataclass(frozen=True)
class Budget:
    """`most`: tokens of a thought, its opening mark not counted. `open`, `close`: its marks. `closing`: the tokens
    that close it, by how many characters of the closing mark are there. `bytes_of`: what a token adds to
    the text."""

    most: int
    open: bytes
    close: str
    closing: Callable[[int], tuple[int, ...]]
    bytes_of: Callable[[int], bytes]
    vocab_size: int

    @property
    def end(self) -> bytes:
        return self.close.encode()

    def forced(self, text: bytes) -> tuple[int, ...]:
        """The tokens that close a thought with this end."""
        lengths = range(len(self.close) - 1, 0, -1)
        return self.closing(next((n for n in lengths if text.endswith(self.close[:n].encode())), 0))


class Position(NamedTuple):
    """`text`: of the output, while it may still begin a thought; the end of the thought, inside. `used`: the
    tokens of the thought. `forced`: the tokens that must come now."""

    place: Place
    text: bytes = b""
    used: int = 0
    forced: tuple[int, ...] = ()

    def after(self, token: int, budget: Budget) -> Position:
        """The position after a token that is allowed here."""
        if self.place == "behind" or self.forced:
            return self._replace(forced=self.forced[1:]) if len(self.forced) > 1 else Position("behind")
        text = self.text + budget.bytes_of(token)
        if self.place == "before":
            said = text.lstrip()
            if said.startswith(budget.open):
                return Position("inside", said[len(budget.open) :]).checked(budget)
            return Position("before", text) if budget.open.startswith(said) else Position("behind")
        if budget.end in text:
            return Position("behind")
        text = text[-max(len(budget.end), _LONGEST_CHARACTER) :]
        return Position("inside", text, self.used + 1).checked(budget)

    def checked(self, budget: Budget) -> Position:
        """The same, or closing, if the budget is used up."""
        over = self.used - budget.most
        if self.place != "inside" or over < 0 or (over < _LONGEST_CHARACTER and _is_cut(self.text)):
            return self
        return self._replace(forced=budget.forced(self.text))


class BudgetState:
    """The constraint of one sequence. `inner`: what else its output must match."""

    __slots__ = ("_budget", "_inner", "_positions")

    def __init__(self, budget: Budget, inner: ConstraintState | None, positions: list[Position]) -> None:
        """`positions`: after each consumed token, from the beginning on."""
        self._budget, self._inner, self._positions = budget, inner, positions

    @classmethod
    def begin(cls, budget: Budget, inner: ConstraintState | None, place: Place) -> Self:
        return cls(budget, inner, [Position(place).checked(budget)])

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def is_free_for(self, n_tokens: int) -> bool:
        """Whether any token may come at each of the next `n_tokens` places, whatever comes before it."""
        position = self._positions[-1]
        return self._inner is None and (
            position.place == "behind" or (not position.forced and position.used + n_tokens <= self._budget.most)
        )

    def fill_mask(self, out: Int32Array) -> None:
        if forced := self._positions[-1].forced:
            set_bits(out, forced[:1])
        elif self._inner is not None:
            self._inner.fill_mask(out)
        else:
            set_first_bits(out, self._budget.vocab_size)

    def consume(self, token_id: int) -> bool:
        position = self._positions[-1]
        if position.forced and token_id != position.forced[0]:
            return False
        if self._inner is not None and not self._inner.consume(token_id):
            return False
        self._positions.append(position.after(token_id, self._budget))
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self._positions), "more than was consumed"
        if self._inner is not None:
            self._inner.rollback(n)
        del self._positions[len(self._positions) - n :]

    def fork(self) -> Self:
        inner = None if self._inner is None else self._inner.fork()
        return type(self)(self._budget, inner, [*self._positions])


def _is_cut(text: bytes) -> bool:
    """Whether the last character lacks bytes."""
    for back in range(1, min(_LONGEST_CHARACTER, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # where a character begins
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
