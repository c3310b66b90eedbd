"""What several schemas allow together, as alternatives of one type each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import combinations
from typing import TypeVar

from petiole.gpu_worker.constraints.schema import numbers, patterns
from petiole.gpu_worker.constraints.schema.nodes import (
    ANYTHING,
    NOTHING,
    SHAPES,
    AllOf,
    AnyOf,
    Anything,
    Array,
    Boolean,
    ItemRules,
    KeyRules,
    Node,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    String,
)
from petiole.gpu_worker.exceptions import InvalidRequest

MAX_ALTERNATIVES = 100_000
"""Maximum number of alternatives that are compared or combined for one schema."""

MAX_DISJOINT_DEPTH = 4
"""How deep two options of a `oneOf` are compared."""

Bound = TypeVar("Bound", int, Fraction)


class Intersection:
    """Combines the nodes of one schema. `resolve` gives the node of a reference."""

    def __init__(self, field: str, resolve: Callable[[str], Node]) -> None:
        self._field = field
        self._resolve = resolve
        self._left = MAX_ALTERNATIVES
        self._exclusive: set[AnyOf] = set()

    def shapes(self, node: Node, within: frozenset[str] = frozenset()) -> tuple[Shape, ...]:
        """The alternatives of a node. `within`: the references that led here; a reference that only leads to
        itself allows nothing."""
        match node:
            case Anything():
                return SHAPES
            case Reference(pointer):
                return () if pointer in within else self.shapes(self._resolve(pointer), within | {pointer})
            case AnyOf(options):
                self.check_exclusive(node)
                found: list[Shape] = []
                for option in options:
                    self._count()
                    found += self.shapes(option, within)
                return tuple(dict.fromkeys(found))
            case AllOf(parts):
                met: Iterable[Shape] = SHAPES
                for part in parts:
                    if part != ANYTHING:
                        met = list(self._products(met, self.shapes(part, within)))
                return tuple(met)
        return (node,)

    def check_exclusive(self, node: AnyOf) -> None:
        """Refuse a `oneOf` unless no value can match two of its options. Each is checked once, since its options
        may contain it."""
        if not node.exclusive or node in self._exclusive:
            return
        self._exclusive.add(node)
        for (k, one), (j, other) in combinations(enumerate(node.options), 2):
            if not self._disjoint(one, other, MAX_DISJOINT_DEPTH):
                limit = (
                    "must have options that exclude each other, by type or by a required property; or use anyOf"
                )
                raise InvalidRequest(node.place, limit, f"options {k} and {j}")

    def values_of(self, rules: Iterable[KeyRules], names: Iterable[str]) -> Iterator[Node]:
        """What the value of each of these keys must be."""
        named = [(rule, dict(rule.named)) for rule in rules]
        for name in names:
            yield both(part for rule, values in named for part in _of_key(rule, values, name, self._field))

    def _products(self, ones: Iterable[Shape], others: Iterable[Shape]) -> Iterator[Shape]:
        others = list(others)
        for one in ones:
            for other in others:
                self._count()
                if (met := _met(one, other)) is not None:
                    yield met

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(
                self._field, f"must combine at most {MAX_ALTERNATIVES} alternatives", "more (anyOf, oneOf, allOf)"
            )

    def _disjoint(self, one: Node, other: Node, depth: int) -> bool:
        return depth > 0 and all(
            self._apart(a, b, depth - 1) for a in self.shapes(one) for b in self.shapes(other)
        )

    def _apart(self, one: Shape, other: Shape, depth: int) -> bool:
        """Whether two shapes surely have no value in common."""
        self._count()
        met = _met(one, other)
        match met:
            case None:
                return True
            case String(low, high, _, values):
                return values == () or (high is not None and low > high)
            case Array(low=low, high=high):
                return high is not None and low > high
            case Object():
                return any(self._never(value, depth) for value in self.values_of(met.rules, met.required))
        return False

    def _never(self, node: Node, depth: int) -> bool:
        """Whether a node surely allows nothing."""
        return depth > 0 and all(self._apart(shape, shape, depth - 1) for shape in self.shapes(node))


def both(nodes: Iterable[Node]) -> Node:
    """The node of values that all `nodes` allow."""
    parts = tuple(dict.fromkeys(node for node in nodes if node != ANYTHING))
    if NOTHING in parts:
        return NOTHING
    return ANYTHING if not parts else parts[0] if len(parts) == 1 else AllOf(parts)


def _of_key(rule: KeyRules, values: Mapping[str, Node], name: str, field: str) -> list[Node]:
    named = [values[name]] if name in values else []
    matching = [node for pattern, node in rule.patterns if patterns.found(field, pattern, name)]
    return [*named, *matching] or [rule.rest]


def _met(one: Shape, other: Shape) -> Shape | None:
    """What two shapes have in common; None if they have no type or no number in common."""
    match one, other:
        case Null(), Null():
            return one
        case Boolean(these), Boolean(those):
            return Boolean(these & those) if these & those else None
        case Number(), Number():
            return _met_numbers(one, other)
        case String(), String():
            return _met_strings(one, other)
        case Array(), Array():
            rules = tuple(dict.fromkeys(one.rules + other.rules))
            return Array(rules, max(one.low, other.low), _least(one.high, other.high), one.unique or other.unique)
        case Object(), Object():
            return Object(
                tuple(dict.fromkeys(one.rules + other.rules)),
                tuple(dict.fromkeys(one.required + other.required)),
                max(one.low, other.low),
                _least(one.high, other.high),
                tuple(dict.fromkeys(one.names + other.names)),
            )
    return None


def _met_numbers(one: Number, other: Number) -> Number | None:
    low, high = _greatest(one.low, other.low), _least(one.high, other.high)
    multiple = one.multiple or other.multiple
    if one.multiple and other.multiple:
        a, b = one.multiple, other.multiple
        scale = a.denominator * b.denominator
        multiple = Fraction(math.lcm(int(a * scale), int(b * scale)), scale)
    return numbers.normal(
        Number(
            low,
            high,
            any(each.low_open and each.low == low for each in (one, other)),
            any(each.high_open and each.high == high for each in (one, other)),
            one.integer or other.integer,
            multiple,
        )
    )


def _met_strings(one: String, other: String) -> String | None:
    values = one.values if other.values is None else other.values
    if one.values is not None and other.values is not None:
        both_have = frozenset(other.values)
        values = tuple(value for value in one.values if value in both_have)
    low, high = max(one.low, other.low), _least(one.high, other.high)
    if values is not None:
        values = tuple(value for value in values if low <= len(value) and (high is None or len(value) <= high))
    if values == () or (high is not None and low > high):
        return None
    return String(low, high, tuple(dict.fromkeys(one.patterns + other.patterns)), values)


def _least(one: Bound | None, other: Bound | None) -> Bound | None:
    return one if other is None else other if one is None else min(one, other)


def _greatest(one: Bound | None, other: Bound | None) -> Bound | None:
    return one if other is None else other if one is None else max(one, other)


def item_at(rules: Iterable[ItemRules], index: int) -> Node:
    """What the item at this index must be."""
    return both(rule.at(index) for rule in rules)
