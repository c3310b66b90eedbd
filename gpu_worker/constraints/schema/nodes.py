"""What a JSON schema allows, as data.

A schema is a `Node`. Keywords beside each other, such as `properties` beside `anyOf`, are an `AllOf`: they hold
together. `meeting` turns every node into alternatives of one type each, the `Shape`s. Nodes are compared by what
they allow, so equal parts of a schema share their rules in the grammar.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A part of the schema, by its JSON pointer. It may contain itself."""

    pointer: str


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Values that one of the options allows. `exclusive`: exactly one (`oneOf`); `place` is the keyword's path."""

    options: tuple[Node, ...]
    exclusive: bool = False
    place: str = ""


@dataclass(frozen=True, slots=True)
class AllOf:
    """Values that all parts allow."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Null:
    pass


@dataclass(frozen=True, slots=True)
class Boolean:
    values: frozenset[bool] = frozenset({False, True})


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers from `low` to `high`; None is no bound, and an open bound is not itself allowed. `multiple`:
    multiples of this number only; 0 is no limit."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    multiple: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class String:
    """Text of `low` to `high` characters in which each of `patterns` is found. `values`: one of these only."""

    low: int = 0
    high: int | None = None
    patterns: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ItemRules:
    """`items` and `prefixItems` of one schema: what the item at an index must be."""

    prefix: tuple[Node, ...] = ()
    rest: Node = Anything()

    def at(self, index: int) -> Node:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class Array:
    """Lists of `low` to `high` items that follow each of `rules`."""

    rules: tuple[ItemRules, ...] = ()
    low: int = 0
    high: int | None = None
    unique: bool = False


@dataclass(frozen=True, slots=True)
class KeyRules:
    """`properties`, `patternProperties` and `additionalProperties` of one schema: what a key's value must be."""

    named: tuple[tuple[str, Node], ...] = ()
    patterns: tuple[tuple[str, Node], ...] = ()
    rest: Node = Anything()


@dataclass(frozen=True, slots=True)
class Object:
    """Objects of `low` to `high` entries that follow each of `rules`. `names`: what all keys must be."""

    rules: tuple[KeyRules, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    names: tuple[Node, ...] = ()


Shape = Null | Boolean | Number | String | Array | Object
Node = Anything | Reference | AnyOf | AllOf | Shape

ANYTHING = Anything()
NOTHING = AnyOf(())
SHAPES: tuple[Shape, ...] = (Null(), Boolean(), Number(), String(), Array(), Object())
