"""A subset of regular expressions, for the marks of a template.

A template comes with a checkpoint, so its patterns are somebody else's. They are run as automata: in a time that
is linear in the text, one character after the other, with no way back. The subset: literals, escapes, classes,
groups, named groups, alternatives, repeats. A mark is always the longest one; a lazy repeat only says which group
gets what. Everything else, such as a lookahead, is refused by a `ValueError`.

    parsed(pattern)   the pattern as a tree
    literal(text)     the tree of a text
    Program           the instructions of several trees, each with its number
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

MOST_REPEATS = 64
MOST_INSTRUCTIONS = 4000
MOST_GROUPS = 16
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_TESTS: dict[str, Callable[[str], bool]] = {
    "s": str.isspace,
    "d": str.isdecimal,
    "w": lambda letter: letter.isalnum() or letter == "_",
}


class CharacterClass(NamedTuple):
    """Characters: those in `letters`, in `ranges`, and in the classes `classes` ("s", "d", "w", and in capitals
    their opposites). `negated`: all others."""

    letters: frozenset[str]
    ranges: tuple[tuple[str, str], ...] = ()
    classes: str = ""
    negated: bool = False

    def has(self, letter: str) -> bool:
        found = letter in self.letters or any(low <= letter <= high for low, high in self.ranges)
        if not found and self.classes:
            found = any(_TESTS[one.lower()](letter) is one.islower() for one in self.classes)
        return found is not self.negated

    @property
    def inside(self) -> str:
        """What stands in brackets in Python's regular expressions."""
        letters = "".join(map(re.escape, sorted(self.letters)))
        ranges = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in self.ranges)
        return letters + ranges + "".join(f"\\{one}" for one in self.classes)


class Concatenation(NamedTuple):
    parts: tuple[Node, ...]


class Alternation(NamedTuple):
    parts: tuple[Node, ...]


class Repetition(NamedTuple):
    part: Node
    least: int
    most: int | None
    lazy: bool = False


class Group(NamedTuple):
    name: str
    part: Node


Node = CharacterClass | Concatenation | Alternation | Repetition | Group

ANY = CharacterClass(frozenset(), negated=True)
SPACES = Repetition(CharacterClass(frozenset(), classes="s"), 0, None)


def literal(text: str) -> Concatenation:
    return Concatenation(tuple(CharacterClass(frozenset(letter)) for letter in text))


def any_of(sets: Sequence[CharacterClass]) -> str:
    """A regular expression of Python's for a character that is in one of the sets."""
    plain = "".join(one.inside for one in sets if not one.negated)
    others = [f"[^{one.inside}]" if one.inside else r"[\s\S]" for one in sets if one.negated]
    return "|".join([*([f"[{plain}]"] if plain else []), *others]) or "(?!)"


def parsed(pattern: str) -> Node:
    """Raises ValueError."""
    reader = _PatternReader(pattern)
    node = reader.either()
    if reader.at < len(pattern):
        raise reader.refused("a parenthesis too many")
    return node


def groups(node: Node) -> Iterator[str]:
    """The names of the groups in a tree."""
    match node:
        case Group(name, part):
            yield name
            yield from groups(part)
        case Concatenation(parts) | Alternation(parts):
            for part in parts:
                yield from groups(part)
        case Repetition(part):
            yield from groups(part)


def node_of(node: Node, name: str) -> Node | None:
    """What the first group with this name has."""
    match node:
        case Group(own, part) if own == name:
            return part
        case Group(_, part) | Repetition(part):
            return node_of(part, name)
        case Concatenation(parts) | Alternation(parts):
            return next((found for part in parts if (found := node_of(part, name)) is not None), None)
    return None


def matches(node: Node, text: str) -> bool:
    """Whether the whole text is one of those that the tree stands for."""
    program = Program([node])
    at = program.closure([0])
    for letter in text:
        steps = map(program.steps.__getitem__, at)
        at = program.closure([one.to[0] for one in steps if one.set is not None and one.set.has(letter)])
    return any(program.steps[one].mark >= 0 for one in at)


def without_spaces_around(node: Node) -> Node:
    """The tree without `\\s*` at its ends."""
    if not isinstance(node, Concatenation):
        return node
    parts = list(node.parts)
    while parts and parts[0] == SPACES:
        del parts[0]
    while parts and parts[-1] == SPACES:
        del parts[-1]
    return Concatenation(tuple(parts))


class _PatternReader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.depth = pattern, 0, 0

    def refused(self, what: str) -> ValueError:
        return ValueError(f"pattern {self.pattern[:200]!r}: {what} at {self.at}")

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.refused("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _takes(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def either(self) -> Node:
        self.depth += 1
        if self.depth > MOST_GROUPS:
            raise self.refused(f"more than {MOST_GROUPS} nested groups")
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._repeated(self._one()))
        return Concatenation(tuple(parts))

    def _one(self) -> Node:
        match letter := self._next():
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return ANY
            case "\\":
                return self._escape()
            case "^" | "$" | "*" | "+" | "?" | "{":
                raise self.refused(f"{letter!r} is not among what is read here")
        return CharacterClass(frozenset(letter))

    def _group(self) -> Node:
        name = ""
        if self._takes("?P<"):
            end = self.pattern.find(">", self.at)
            name = self.pattern[self.at : end]
            if not name.isidentifier():
                raise self.refused("no name of a group")
            self.at = end + 1
        elif self._takes("?") and not self._takes(":"):
            raise self.refused("a group of this kind is not among what is read here")
        inner = self.either()
        if not self._takes(")"):
            raise self.refused("a parenthesis is missing")
        return Group(name, inner) if name else inner

    def _repeated(self, node: Node) -> Node:
        least: int
        most: int | None
        if self._takes("*"):
            least, most = 0, None
        elif self._takes("+"):
            least, most = 1, None
        elif self._takes("?"):
            least, most = 0, 1
        elif found := re.compile(r"\{([0-9]{1,3})(,([0-9]{1,3})?)?\}").match(self.pattern, self.at):
            self.at = found.end()
            least = int(found[1])
            most = (int(found[3]) if found[3] else None) if found[2] else least
        else:
            return node
        if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
            raise self.refused(f"a repeat of more than {MOST_REPEATS}, or of none")
        return Repetition(node, least, most, lazy=self._takes("?"))

    def _escape(self) -> CharacterClass:
        letter = self._next()
        if letter.lower() in _TESTS:
            return CharacterClass(frozenset(), classes=letter)
        if letter in _CONTROL:
            return CharacterClass(frozenset(_CONTROL[letter]))
        if letter.isalnum():
            raise self.refused(f"the escape {letter!r} is not among what is read here")
        return CharacterClass(frozenset(letter))

    def _class(self) -> CharacterClass:
        negated = self._takes("^")
        letters: set[str] = set()
        ranges: list[tuple[str, str]] = []
        classes = ""
        first = True
        while first or not self._takes("]"):
            first, low = False, self._in_class()
            if len(low) == 2:  # a class
                classes += low[1]
            elif self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                high = self._in_class()
                if len(high) == 2 or high < low:
                    raise self.refused("no range")
                ranges.append((low, high))
            else:
                letters.add(low)
        return CharacterClass(frozenset(letters), tuple(ranges), classes, negated)

    def _in_class(self) -> str:
        """A character, or a class as its escape."""
        letter = self._next()
        if letter != "\\":
            return letter
        found = self._escape()
        return f"\\{found.classes}" if found.classes else min(found.letters)


class Step(NamedTuple):
    """An instruction. `set`: take a character, go on at `to`. No set: go on at each of `to`; `group`: a group
    begins or ends here. `mark`: the tree with this number is matched."""

    to: tuple[int, ...] = ()
    set: CharacterClass | None = None
    group: str = ""
    ends: bool = False
    mark: int = -1


class Program:
    """The instructions of several trees."""

    def __init__(self, trees: Sequence[Node]) -> None:
        self.steps: list[Step] = [Step()]
        starts = []
        for number, tree in enumerate(trees):
            starts.append(self._add(tree, self._step(Step(mark=number))))
        self.steps[0] = Step(to=tuple(starts))

    def _step(self, step: Step) -> int:
        if len(self.steps) >= MOST_INSTRUCTIONS:
            raise ValueError(f"patterns: they must have at most {MOST_INSTRUCTIONS} steps")
        self.steps.append(step)
        return len(self.steps) - 1

    def _add(self, node: Node, then: int) -> int:
        """Add the instructions of a tree, which lead to `then`. Returns the first one."""
        match node:
            case CharacterClass():
                return self._step(Step((then,), node))
            case Concatenation(parts):
                for part in reversed(parts):
                    then = self._add(part, then)
                return then
            case Alternation(parts):
                return self._step(Step(tuple(self._add(part, then) for part in parts)))
            case Group(name, part):
                inner = self._add(part, self._step(Step((then,), group=name, ends=True)))
                return self._step(Step((inner,), group=name))
            case Repetition(part, least, most, lazy):
                if most is None:
                    loop = self._step(Step())
                    self.steps[loop] = self._choice(self._add(part, loop), then, lazy)
                    then = loop
                for _ in range((most or least) - least):
                    then = self._step(self._choice(self._add(part, then), then, lazy))
                for _ in range(least):
                    then = self._add(part, then)
                return then

    def _choice(self, more: int, then: int, lazy: bool) -> Step:
        return Step((then, more) if lazy else (more, then))

    def closure(self, steps: Iterable[int]) -> frozenset[int]:
        """The closure of these instructions: they, and all that follow without a character."""
        found, waiting = set[int](), list(steps)
        while waiting:
            at = waiting.pop()
            if at not in found:
                found.add(at)
                if self.steps[at].set is None:
                    waiting += self.steps[at].to
        return frozenset(at for at in found if self.steps[at].set is not None or self.steps[at].mark >= 0)

    def captures(self, text: str, mark: int) -> dict[str, str]:
        """The groups of a text that the tree `mark` matches as a whole."""
        threads = self._follow([(0, {})], 0)
        for place, letter in enumerate(text):
            taken = [
                (self.steps[at].to[0], found)
                for at, found in threads.items()
                if (letters := self.steps[at].set) is not None and letters.has(letter)
            ]
            threads = self._follow(taken, place + 1)
        for at, found in threads.items():
            if self.steps[at].mark == mark:
                return {name: text[begin:end] for name, (begin, end) in found.items() if end >= 0}
        return {}

    def _follow(
        self, threads: Iterable[tuple[int, dict[str, tuple[int, int]]]], place: int
    ) -> dict[int, dict[str, tuple[int, int]]]:
        """By instruction: what its first thread has captured. Earlier threads come first."""
        reached: dict[int, dict[str, tuple[int, int]]] = {}
        waiting = list(threads)[::-1]
        while waiting:
            at, found = waiting.pop()
            if at in reached:
                continue
            reached[at] = found
            step = self.steps[at]
            if step.group:
                begin = found.get(step.group, (place, -1))[0] if step.ends else place
                found = {**found, step.group: (begin, place if step.ends else -1)}
            if step.set is None:
                waiting += [(to, found) for to in reversed(step.to)]
        return reached
