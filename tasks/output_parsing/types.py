"""Which values the parameters of a tool may have, by its schema: one answer for who enforces calls, and for who
reads them.

    types_of(tools)         by tool and parameter: types as text, such as "integer|null"; "any": all of them
    parameters_of(schema)   the parameters of a tool, also those behind `$ref` and `allOf`
    Schema(root).values(…)  the values that a part of a schema allows

What is not read here, such as `not` or `if`, allows every value. So does a reference that leads nowhere, or back
to itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANY = "any"
_FEW: dict[str, tuple[Any, ...]] = {"null": (None,), "boolean": (False, True)}


@dataclass(frozen=True)
class Values:
    """`kinds`: JSON types; a number may be an integer. `listed`: the values, where the schema lists them."""

    kinds: frozenset[str]
    listed: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, kinds: Iterable[str]) -> Values:
        kinds = frozenset(kinds) | ({"integer"} if "number" in kinds else set())
        if kinds <= _FEW.keys():
            return cls(kinds, tuple(value for kind in sorted(kinds) for value in _FEW[kind]))
        return cls(kinds)

    @classmethod
    def list_of(cls, values: Iterable[Any]) -> Values:
        listed = tuple({json.dumps(value, sort_keys=True): value for value in values}.values())
        return cls(frozenset(map(_kind, listed)), listed)

    def __and__(self, other: Values) -> Values:
        if self.listed is None and other.listed is None:
            return Values.of(self.kinds & other.kinds)
        one, two = (self, other) if self.listed is not None else (other, self)
        kept = [value for value in one.listed or () if _kind(value) in two.kinds]
        if two.listed is not None:
            known = {json.dumps(value, sort_keys=True) for value in two.listed}
            kept = [value for value in kept if json.dumps(value, sort_keys=True) in known]
        return Values.list_of(kept)

    def __or__(self, other: Values) -> Values:
        if self.listed is None or other.listed is None:
            return Values.of(self.kinds | other.kinds)
        return Values.list_of([*self.listed, *other.listed])

    @property
    def named(self) -> str:
        """The types as text."""
        kinds = self.kinds - ({"integer"} if "number" in self.kinds else set())
        return ANY if self.kinds in (EVERY.kinds, frozenset()) else "|".join(filter(kinds.__contains__, TYPES))


EVERY, NONE = Values(frozenset(TYPES)), Values(frozenset(), ())


@dataclass
class Schema:
    """A schema, to which the references in its parts lead."""

    root: Any
    _known: dict[str, Values] = field(default_factory=dict)

    def values(self, part: Any) -> Values:
        try:
            return self._values(part)
        except RecursionError:  # nested too deeply
            return EVERY

    def _values(self, part: Any) -> Values:
        if not isinstance(part, Mapping):
            return NONE if part is False else EVERY
        found = [EVERY]
        given = part.get("type")
        if names := [one for one in (given if isinstance(given, list) else [given]) if one in TYPES]:
            found.append(Values.of(names))
        if isinstance(listed := part.get("enum"), list):
            found.append(Values.list_of(listed))
        if "const" in part:
            found.append(Values.list_of([part["const"]]))
        if isinstance(pointer := part.get("$ref"), str):
            found.append(self._referred(pointer))
        found += map(self._values, _listed(part, "allOf"))
        for name in ("anyOf", "oneOf"):
            if alternatives := _listed(part, name):
                found.append(reduce(Values.__or__, map(self._values, alternatives)))
        return reduce(Values.__and__, found)

    def _referred(self, pointer: str) -> Values:
        if pointer not in self._known:
            self._known[pointer] = EVERY  # for a reference to itself
            self._known[pointer] = self._values(self.at(pointer))
        return self._known[pointer]

    def at(self, pointer: str) -> Any:
        """The part at a JSON pointer; None if there is none."""
        first, *steps = pointer.split("/")
        part = self.root if first == "#" else None
        for step in steps:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            match part:
                case dict():
                    part = part.get(step)
                case list() if step.isdecimal() and int(step) < len(part):
                    part = part[int(step)]
                case _:
                    return None
        return part


@dataclass
class Parameters:
    """`schemas`: by name. `needed`: the names of those that every call has."""

    schemas: dict[str, Any] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)


def parameters_of(schema: Any) -> Parameters:
    """In the order of the schema. What two parts of `allOf` say of one parameter holds together."""
    found, root = Parameters(), Schema(schema)
    waiting, seen = [schema], {"#"}
    for part in waiting:
        if not isinstance(part, Mapping):
            continue
        properties, needed, pointer = (part.get(name) for name in ("properties", "required", "$ref"))
        for name, one in (properties if isinstance(properties, Mapping) else {}).items():
            both = name in found.schemas
            found.schemas[name] = {"allOf": [found.schemas[name], one]} if both else one
        found.needed |= {name for name in (needed if isinstance(needed, list) else ()) if isinstance(name, str)}
        waiting += _listed(part, "allOf")
        if isinstance(pointer, str) and pointer not in seen:
            seen.add(pointer)
            waiting.append(root.at(pointer))
    return found


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """By tool: the types of each parameter."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        match tool.get("function", tool):
            case {"name": str(name), **rest}:
                schema = Schema(rest.get("parameters"))
                parts = parameters_of(schema.root).schemas
                found[name] = {key: schema.values(part).named for key, part in parts.items()}
    return found


def names_in(schema: Any) -> set[str]:
    """The names of all properties, anywhere in a schema."""
    found, waiting = set[str](), [schema]
    for part in waiting:
        match part:
            case dict():
                waiting += part.values()
                found |= part["properties"].keys() if isinstance(part.get("properties"), dict) else set()
            case list():
                waiting += part
    return found


def _listed(part: Mapping[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == value // 1 else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"
