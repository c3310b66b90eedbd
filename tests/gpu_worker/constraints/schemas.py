"""Random JSON schemas of the kinds that people ask models for."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "tags", "city", "größe", 'quo"te', "note"]
PATTERNS = ["^[A-Z]{2}[0-9]{2}$", "^(red|green|blue)$", "^[a-z]+(-[a-z]+)?$"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    plain = [_string, _integer, _number, _enum, _constant, lambda _: {"type": rng.choice(["boolean", "null"])}]
    nested = [_object, _array, _union, _reference]
    kind = rng.choice(nested if depth == 0 else plain if depth > 2 else plain + nested)
    return kind(rng) if kind in plain else kind(rng, depth)


def _string(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(0, 3)
    limits: list[dict[str, Any]] = [
        {"minLength": low, "maxLength": low + rng.randint(0, 8)},
        {"pattern": rng.choice(PATTERNS)},
        {"format": rng.choice(["date", "uuid", "ipv4"])},
    ]
    return {"type": "string", **rng.choice(limits)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.randint(-10, 0), "exclusiveMaximum": rng.randint(1, 50) + 0.5}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "b c", 1, 2.5, None, True, "日本", {"k": [1]}], rng.randint(1, 4))}


def _constant(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, False, ["x", 1]])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    items = random_schema(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """A definition used twice; only at the top, where "$defs" is found."""
    if depth:
        return _object(rng, depth)
    part = {"$ref": "#/$defs/part"}
    return {
        "$defs": {"part": random_schema(rng, depth + 1)},
        "type": "object",
        "properties": {"first": part, "second": part},
        "required": ["first"],
        "additionalProperties": False,
    }
