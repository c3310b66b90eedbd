"""From the keywords of a JSON schema to nodes. What cannot be enforced is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from petiole.gpu_worker.constraints.schema import patterns, string_formats
from petiole.gpu_worker.constraints.schema.nodes import (
    ANYTHING,
    NOTHING,
    SHAPES,
    AllOf,
    AnyOf,
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

_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")
_OF_OBJECTS = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames"),
    *("required", "minProperties", "maxProperties"),
)
ENFORCED = frozenset({"type", *_APPLICATORS, *_OF_NUMBERS, *_OF_STRINGS, *_OF_ARRAYS, *_OF_OBJECTS})
REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment", "$defs", "definitions"),
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
        *("discriminator", "nullable", "externalDocs", "xml"),
    }
)
_WRAPPERS = {
    "json_schema": "the 'schema' of its 'json_schema'",
    "function": "the 'parameters' of its 'function'",
    "schema": "its 'schema'",
    "parameters": "its 'parameters'",
    "input_schema": "its 'input_schema'",
    "inputSchema": "its 'inputSchema'",
}
"""Objects of other interfaces that contain a schema, by the key that tells."""

_TYPES = {
    "null": Null,
    "boolean": Boolean,
    "number": Number,
    "integer": Number,
    "string": String,
    "array": Array,
    "object": Object,
}


class Reader:
    """Reads the parts of one schema. `root`: the whole schema; `field`: its name in errors."""

    def __init__(self, field: str, root: Any) -> None:
        self._field = field
        self._root = root
        self._names = dict(_names(root))
        self._read: dict[str, Node] = {}
        if isinstance(root, dict):
            self._check_not_wrapped(root)

    def root(self) -> Node:
        return self._node(self._field, self._root)

    def resolve(self, pointer: str) -> Node:
        """The node that a reference names."""
        if pointer not in self._read:
            self._read[pointer] = self._node(self._field + pointer[1:].replace("/", "."), self._at(pointer))
        return self._read[pointer]

    # ------------------------------------------------------------ one schema

    def _node(self, path: str, schema: Any) -> Node:
        if isinstance(schema, bool):
            return ANYTHING if schema else NOTHING
        if not isinstance(schema, dict):
            raise InvalidRequest(path, "must be a JSON schema (an object)", type(schema).__name__)
        self._check_keywords(path, schema)
        parts: list[Node] = []
        plain = [key for key in schema if key in ENFORCED and key not in _APPLICATORS]
        for key, value in schema.items():
            if key in _APPLICATORS:
                parts.append(self._applied(path, key, value, schema))
            elif plain and key == plain[0]:
                parts.append(self._typed(path, schema))
        return ANYTHING if not parts else parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _check_keywords(self, path: str, schema: Mapping[str, Any]) -> None:
        for key in schema:
            if key in REFUSED:
                raise InvalidRequest(f"{path}.{key}", "cannot be enforced; leave it out", schema[key])
        if schema and not any(_is_known(key) for key in schema):
            raise InvalidRequest(
                path, "must have a keyword of JSON schema ({} allows any value)", ", ".join(schema)
            )

    def _check_not_wrapped(self, schema: Mapping[str, Any]) -> None:
        enforced = ENFORCED.intersection(schema)
        if enforced - {"type"} or (enforced and all(map(_is_type, _several(schema["type"])))):
            return
        for key, instead in _WRAPPERS.items():
            if isinstance(schema.get(key), dict):
                limit = f"must be a JSON schema; this object contains one: give {instead}"
                raise InvalidRequest(self._field, limit, ", ".join(schema))

    # ------------------------------------------------------------ keywords that combine

    def _applied(self, path: str, key: str, value: Any, schema: Mapping[str, Any]) -> Node:
        place = f"{path}.{key}"
        if key == "$ref":
            return Reference(self._pointer(place, value))
        if key == "const":
            return _literal(place, value)
        values = _list(place, value)
        if key == "enum":
            return _one_of(place, values)
        nodes = tuple(self._node(f"{place}[{k}]", part) for k, part in enumerate(values))
        if key == "allOf":
            return AllOf(nodes)
        tag = schema.get("discriminator")
        if isinstance(tag, dict) and isinstance(tag.get("propertyName"), str):
            tagged = Object(required=(tag["propertyName"],))
            nodes = tuple(AllOf((node, tagged)) for node in nodes)
        return AnyOf(nodes, key == "oneOf", place)

    def _pointer(self, place: str, reference: Any) -> str:
        if not isinstance(reference, str):
            raise InvalidRequest(place, "must be a string", type(reference).__name__)
        if reference == "#" or reference.startswith("#/"):
            pointer: str | None = reference
        else:
            pointer = self._names.get(reference)
        if pointer is None or self._at(pointer) is None:
            raise InvalidRequest(place, "must name a part of this schema", reference)
        return pointer

    def _at(self, pointer: str) -> Any:
        part = self._root
        for step in pointer.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key in map(str, range(len(part))):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                return None
        return part

    # ------------------------------------------------------------ keywords of one type

    def _typed(self, path: str, schema: Mapping[str, Any]) -> Node:
        kinds = schema.get("type")
        if kinds is None:
            shapes: list[Shape] = list(SHAPES)
        else:
            names = _several(kinds)
            for name in names:
                if not _is_type(name):
                    raise InvalidRequest(f"{path}.type", f"must be one of {', '.join(_TYPES)}", name)
            if "number" in names:
                names = [name for name in names if name != "integer"]
            shapes = [
                Number(integer=True) if name == "integer" else _TYPES[name]() for name in dict.fromkeys(names)
            ]
        read = [self._with_keywords(path, shape, schema) for shape in shapes]
        return read[0] if len(read) == 1 else AnyOf(tuple(read))

    def _with_keywords(self, path: str, shape: Shape, schema: Mapping[str, Any]) -> Node:
        match shape:
            case Number():
                return _number(path, shape, schema)
            case String():
                return _string(path, schema)
            case Array():
                return self._array(path, schema)
            case Object():
                return self._object(path, schema)
        return shape

    def _array(self, path: str, schema: Mapping[str, Any]) -> Node:
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        place = "prefixItems"
        if isinstance(rest, list):  # before draft 2020-12
            prefix, rest, place = rest, schema.get("additionalItems", True), "items"
        listed = _list(f"{path}.{place}", prefix)
        nodes = tuple(self._node(f"{path}.{place}[{k}]", part) for k, part in enumerate(listed))
        rules = ItemRules(nodes, self._node(f"{path}.items", rest))
        low, high = _count(path, schema, "minItems") or 0, _count(path, schema, "maxItems")
        return Array((rules,), low, high, schema.get("uniqueItems") is True)

    def _object(self, path: str, schema: Mapping[str, Any]) -> Node:
        named = _object(f"{path}.properties", schema.get("properties", {}))
        searched = _object(f"{path}.patternProperties", schema.get("patternProperties", {}))
        for pattern in searched:
            _check_pattern(f"{path}.patternProperties", pattern)
        rules = KeyRules(
            tuple((name, self._node(f"{path}.properties.{name}", part)) for name, part in named.items()),
            tuple(
                (pattern, self._node(f"{path}.patternProperties.{pattern}", part))
                for pattern, part in searched.items()
            ),
            self._node(f"{path}.additionalProperties", schema.get("additionalProperties", True)),
        )
        required = _list(f"{path}.required", schema.get("required", []))
        for name in required:
            if not isinstance(name, str):
                raise InvalidRequest(f"{path}.required", "must be a list of strings", name)
        names = schema.get("propertyNames", True)
        return Object(
            () if rules == KeyRules() else (rules,),
            tuple(dict.fromkeys(required)),
            _count(path, schema, "minProperties") or 0,
            _count(path, schema, "maxProperties"),
            () if names is True else (self._node(f"{path}.propertyNames", names),),
        )


def _is_known(key: str) -> bool:
    return key in ENFORCED or key in ANNOTATIONS or key.startswith("x-")


def _is_type(name: Any) -> bool:
    return isinstance(name, str) and name in _TYPES


def _several(names: Any) -> list[Any]:
    """The types that a `type` lists, or its only one."""
    return names if isinstance(names, list) else [names]


def _names(part: Any, pointer: str = "#") -> Iterator[tuple[str, str]]:
    """The names that a schema's parts give themselves, and their JSON pointers."""
    if isinstance(part, list):
        for k, item in enumerate(part):
            yield from _names(item, f"{pointer}/{k}")
    elif isinstance(part, dict):
        for key in ("$id", "id"):
            if isinstance(part.get(key), str):
                yield part[key], pointer
        if isinstance(part.get("$anchor"), str):
            yield f"#{part['$anchor']}", pointer
        for key, item in part.items():
            yield from _names(item, f"{pointer}/{key.replace('~', '~0').replace('/', '~1').replace('%', '%25')}")


def _number(path: str, shape: Number, schema: Mapping[str, Any]) -> Node:
    found = {key: _numeric(f"{path}.{key}", schema[key]) for key in _OF_NUMBERS if key in schema}
    low, high = found.get("minimum"), found.get("maximum")
    above, below = found.get("exclusiveMinimum"), found.get("exclusiveMaximum")
    low_open, high_open = schema.get("exclusiveMinimum") is True, schema.get("exclusiveMaximum") is True  # draft 4
    if above is not None and (low is None or above >= low):
        low, low_open = above, True
    if below is not None and (high is None or below <= high):
        high, high_open = below, True
    multiple = abs(found.get("multipleOf") or Fraction(0))
    if found.get("multipleOf") == 0:
        raise InvalidRequest(f"{path}.multipleOf", "must not be 0", 0)
    return Number(low, high, low_open and low is not None, high_open and high is not None, shape.integer, multiple)


def _numeric(place: str, value: Any) -> Fraction | None:
    """A number as it is written; None for the booleans of draft 4 and for infinity, which bounds nothing."""
    if isinstance(value, bool) and place.endswith((".exclusiveMinimum", ".exclusiveMaximum")):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidRequest(place, "must be a number", value)
    return None if isinstance(value, float) and math.isinf(value) else Fraction(Decimal(repr(value)))


def _string(path: str, schema: Mapping[str, Any]) -> Node:
    found: list[str] = []
    if "pattern" in schema:
        _check_pattern(f"{path}.pattern", schema["pattern"])
        found += patterns.without_lookahead(schema["pattern"])
    kind = schema.get("format")
    if kind is not None and kind not in string_formats.UNENFORCED:
        if kind not in string_formats.expressions():
            known = ", ".join(sorted(string_formats.expressions().keys() | string_formats.UNENFORCED))
            raise InvalidRequest(f"{path}.format", f"must be one of {known}; or use pattern", kind)
        found.append(f"^(?:{string_formats.expressions()[kind]})$")
    return String(_count(path, schema, "minLength") or 0, _count(path, schema, "maxLength"), tuple(found))


def _check_pattern(place: str, pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise InvalidRequest(place, "must be a string", type(pattern).__name__)
    patterns.check_repeats(place, pattern)
    fault = patterns.fault(*patterns.without_lookahead(pattern))
    if fault and not fault.startswith(patterns.UNSATISFIABLE):
        raise InvalidRequest(place, fault, pattern)


def _literal(place: str, value: Any) -> Node:
    match value:
        case None:
            return Null()
        case bool():
            return Boolean(frozenset({value}))
        case int() | float():
            number = _numeric(place, value)
            if number is None:
                raise InvalidRequest(place, "must be JSON", value)
            return Number(number, number, integer=isinstance(value, int))
        case str():
            return String(values=(value,))
        case list():
            items = tuple(_literal(place, item) for item in value)
            return Array((ItemRules(items, NOTHING),), len(items), len(items))
    entries = tuple((key, _literal(place, item)) for key, item in value.items())
    return Object((KeyRules(entries, rest=NOTHING),), tuple(value))


def _one_of(place: str, values: list[Any]) -> Node:
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    others = [_literal(place, value) for value in values if not isinstance(value, str)]
    options = [*([String(values=texts)] if texts else []), *dict.fromkeys(others)]
    return options[0] if len(options) == 1 else AnyOf(tuple(options))


def _list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(place, "must be a list", type(value).__name__)
    return value


def _object(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(place, "must be an object", type(value).__name__)
    return value


def _count(path: str, schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise InvalidRequest(f"{path}.{key}", "must be a whole number of at least 0", value)
    return int(value)
