"""Where the next mark of a text is: causal, and independent of how the text fell into pieces.

A mark is found at the first place where any begins, and is the longest one there. While the text so far may be the
beginning of a mark, or of a longer one, nothing is decided: the text is held. A held text that is longer than
`LONGEST` is no mark, whatever follows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from petiole.tasks.output_parsing.patterns import Node, Program, any_of

LONGEST = 512
_KEPT_TRANSITIONS = 20_000
_KEPT_CAPTURES = 128


class Mark(NamedTuple):
    """The mark with this number is at `start:end`."""

    number: int
    start: int
    end: int


class _MarkState:
    """A set of instructions. `mark`: the number of the mark that is matched here; -1: none. `last`: no longer mark
    is possible."""

    __slots__ = ("last", "mark", "next", "steps")

    def __init__(self, program: Program, steps: frozenset[int]) -> None:
        self.steps = steps
        marks = [program.steps[at].mark for at in steps]
        self.mark = min((mark for mark in marks if mark >= 0), default=-1)
        self.last = all(mark >= 0 for mark in marks)
        self.next: dict[str, _MarkState | None] = {}


class Marks:
    """An automaton for several marks. Immutable to its callers, and thread-safe: what it keeps of its states is
    the same whoever computes it."""

    def __init__(self, trees: Sequence[Node]) -> None:
        self._program = Program(trees)
        start = self._program.closure([0])
        self._states: dict[frozenset[int], _MarkState] = {}
        self._start = self._state(start)
        if self._start.mark >= 0:
            raise ValueError("patterns: a mark must have at least one character")
        self._captures = lru_cache(maxsize=_KEPT_CAPTURES)(self._program.captures)  # tools are few, calls are many
        self._first = re.compile("|".join([self._beginning(at) for at in sorted(start)]))

    def _beginning(self, at: int) -> str:
        """What a mark begins with, from this instruction on: a character, and what may come after it."""
        step = self._program.steps[at]
        assert step.set is not None
        after = [self._program.steps[k] for k in self._program.closure([step.to[0]])]
        sets = [one.set for one in after if one.set is not None]
        if len(sets) < len(after):  # the mark may end there
            return any_of([step.set])
        return rf"(?:{any_of([step.set])})(?:(?={any_of(sets)})|\Z)"

    def find(self, text: str, at: int, *, final: bool) -> Mark | int:
        """The first mark from `at` on; or the place up to which there is none, and from which on text is held.
        `final`: no more text comes."""
        size, first = len(text), self._first
        while (begins := first.search(text, at)) is not None:
            begin = here = again = begins.start()
            state: _MarkState | None = self._start
            found = None
            end = min(size, begin + LONGEST)
            while here < end:
                letter = text[here]
                try:
                    state = state.next[letter]  # type: ignore[union-attr]
                except KeyError:
                    state = self._next(state, letter)  # type: ignore[arg-type]
                if state is None:
                    break
                here += 1
                if state is self._start:
                    again = here  # what begins here has the same fate: spaces before a mark are looked at once
                if state.mark >= 0:
                    found = Mark(state.mark, begin, here)
                    if state.last:
                        return found
            if state is not None and here == size and here < begin + LONGEST and not final:
                return begin
            if found is not None:
                return found
            at = again + 1
        return size

    def captures(self, text: str, mark: Mark) -> Mapping[str, str]:
        """The named groups of a mark that was found in the text."""
        return self._captures(text[mark.start : mark.end], mark.number)

    def _next(self, state: _MarkState, letter: str) -> _MarkState | None:
        program = self._program
        to = [
            step.to[0]
            for at in state.steps
            if (step := program.steps[at]).set is not None and step.set.has(letter)
        ]
        found = self._state(program.closure(to)) if to else None
        if len(state.next) >= _KEPT_TRANSITIONS:
            state.next.clear()
        state.next[letter] = found
        return found

    def _state(self, steps: frozenset[int]) -> _MarkState:
        return self._states.setdefault(steps, _MarkState(self._program, steps))
