"""Random JSON schemas of the kinds that people, and pydantic's classes, ask models for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ["name", "age", "tags", "city", "größe", 'quo"te', "note", "__type__"]
PATTERNS = ["^[A-Z]{2}[0-9]{2}$", "^(red|green|blue)$", "^[a-z]+(-[a-z]+)?$", "x|^y", '"']
KEY_PATTERNS = ["^n", "a", "^[a-z]{1,6}$", "^(tags|size)$", "e$"]
FORMATS = ["date", "date-time", "time", "duration", "uuid", "uuid4", "ipv4", "ipv6", "email", "ipv4network"]
VALUES: list[Any] = [
    "a",
    "b c",
    1,
    2.5,
    None,
    True,
    "日本",
    {"k": [1]},
    {"k": [2]},
    {"k": [1], "j": "x"},
    [],
    [1, "a"],
]

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """A schema; some allow nothing."""
    plain: list[Callable[[random.Random], Schema]] = [
        _string,
        _integer,
        _number,
        _multiple,
        _enum,
        _constant,
        _simple,
    ]
    nested = [_object, _object, _map, _array, _tuple, _union, _tagged, _every, _reference, _untyped]
    if depth > 2 or (depth and rng.random() < 0.5):
        return rng.choice(plain)(rng)
    return rng.choice(nested)(rng, depth)


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["null", "boolean"], ["integer", "string"]])}


def _string(rng: random.Random) -> Schema:
    low = rng.randint(0, 3)
    limits: list[Schema] = [
        {"minLength": low, "maxLength": low + rng.randint(0, 8)},
        {"pattern": rng.choice(PATTERNS)},
        {"format": rng.choice(FORMATS)},
        {"pattern": rng.choice(PATTERNS), "maxLength": rng.randint(3, 9)},
        {"format": rng.choice(["password", "path", "binary"]), "maxLength": 5},
    ]
    return {"type": "string", **rng.choice(limits)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def bound(rng: random.Random) -> int | float:
    """A number that somebody may bound another by."""
    return rng.choice(
        [
            rng.randint(-20, 20),
            round(rng.uniform(-3, 3), rng.randint(1, 3)),
            rng.uniform(-1, 1) * 10.0 ** rng.randint(-9, 21),
            0,
        ]
    )


def _number(rng: random.Random) -> Schema:
    low, high = sorted([bound(rng), bound(rng)])
    schema = {rng.choice(["minimum", "exclusiveMinimum"]): low, rng.choice(["maximum", "exclusiveMaximum"]): high}
    if rng.random() < 0.3:
        schema.pop(rng.choice([*schema]))
    return {"type": "number", **schema}


def _multiple(rng: random.Random) -> Schema:
    low = rng.randint(-40, 40) / 4
    kind = rng.choice(["number", "integer"])
    return {
        "type": kind,
        "minimum": low,
        "maximum": low + rng.randint(5, 99) / 4,
        "multipleOf": rng.choice([5, 0.25, 2]),
    }


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice(["fixed", 7, False, ["x", 1], {"a": 1, "b": {"c": []}}])}


def _object(rng: random.Random, depth: int) -> Schema:
    """Closed more often than open: an open one has keys that no schema bounds."""
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in [*names, "extra"] if rng.random() < 0.4],
    }
    if rng.random() < 0.3:
        patterns = rng.sample(KEY_PATTERNS, rng.randint(1, 2))
        schema["patternProperties"] = {pattern: random_schema(rng, depth + 1) for pattern in patterns}
    if rng.random() < 0.8:
        schema["additionalProperties"] = rng.choice([False, False, random_schema(rng, depth + 1)])
    if rng.random() < 0.2 and schema.get("additionalProperties") is False and "patternProperties" not in schema:
        schema["minProperties"] = rng.randint(0, 2)  # keys that no schema names may come twice, and count twice
    if rng.random() < 0.2:
        schema["maxProperties"] = rng.randint(1, 4)
    return schema


def _map(rng: random.Random, depth: int) -> Schema:
    keys = [{"enum": ["red", "green", "blue"]}, {"pattern": "^[a-z]{2}$"}, {"format": "date"}, {"maxLength": 3}]
    return {
        "type": "object",
        "propertyNames": rng.choice(keys),
        "additionalProperties": random_schema(rng, depth + 1),
        "maxProperties": rng.randint(0, 3),
    }


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.3:
        return {**schema, "items": {"enum": ["a", "b", 3, None]}, "uniqueItems": True}
    return {**schema, "items": random_schema(rng, depth + 1)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    prefix = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, random_schema(rng, depth + 1)])
    return {"type": "array", "prefixItems": prefix, "items": rest, "minItems": rng.randint(0, 3), "maxItems": 4}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _tagged(rng: random.Random, depth: int) -> Schema:
    """As a discriminated union of pydantic's classes."""
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": random_schema(rng, depth + 1)},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for kind in ("one", "two")
    ]
    return {"oneOf": options}


def _every(rng: random.Random, depth: int) -> Schema:
    """Schemas that hold together, beside each other or in `allOf`."""
    parts = [_object(rng, depth), _object(rng, depth)]
    if rng.random() < 0.5:
        parts = [{"type": "integer", "minimum": rng.randint(-9, 0)}, {"maximum": rng.randint(0, 99)}]
    return {"allOf": parts} if rng.random() < 0.5 else {"allOf": parts[:1], **parts[1]}


def _untyped(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [{"type": "string"}, {"type": "integer"}], "maxLength": 3, "maximum": rng.randint(0, 9)}


def _reference(rng: random.Random, depth: int) -> Schema:
    """A definition used twice, and one that may contain itself; only at the top, where "$defs" is found."""
    if depth:
        return _object(rng, depth)
    part, tree = {"$ref": "#/$defs/part"}, {"$ref": "#/$defs/tree"}
    node = {"value": part, "left": {"anyOf": [tree, {"type": "null"}]}}
    return {
        "$defs": {
            "part": random_schema(rng, depth + 1),
            "tree": {"type": "object", "properties": node, "required": ["left"], "additionalProperties": False},
        },
        "type": "object",
        "properties": {"first": part, "second": part, "tree": tree},
        "required": rng.choice([["first"], ["tree"]]),
        "additionalProperties": False,
    }
