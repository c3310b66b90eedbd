"""Constraints of every shape, as large as a request may bring them, and random ones.

    python -m tests.gpu_worker.constraints.shapes KIND      each shape of this kind, a line of JSON each
    python -m tests.gpu_worker.constraints.shapes random N  N random schemas

The process compiles as an engine does, and takes some steps with what compiles. A line has
the outcome: "served", or the field, limit and value of the refusal."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from petiole.gpu_worker.constraints import compile_constraint
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.text import Tokenizer
from tests.support import tokenizers as samples

Make = Callable[[int], Any]


def _nested(n: int, inner: Any, around: Callable[[Any], Any]) -> Any:
    for _ in range(n):
        inner = around(inner)
    return inner


def _keys(n: int) -> dict[str, Any]:
    return {f"p{k}": {"type": "string"} for k in range(n)}


def _rules(n: int, rule: str, start: str = "r0", last: str = '"b"', name: str = "r") -> str:
    lines = (f"{name}{k}: {rule.format(k=k, next=f'{name}{k + 1}')}" for k in range(n))
    return "\n".join([f"start: {start}", *lines, f"{name}{n}: {last}"])


def _json(make: Make) -> Make:
    return lambda n: "start: %json " + json.dumps(make(n))


def _text(begin: str, inner: str, end: str) -> Make:
    return lambda n: begin * n + inner + end * n


SCHEMAS: dict[str, tuple[Make, int]] = {
    "properties": (lambda n: {"type": "object", "properties": _keys(n)}, 16_000),
    "closed properties": (
        lambda n: {"type": "object", "properties": _keys(n), "additionalProperties": False},
        16_000,
    ),
    "required properties": (
        lambda n: {"type": "object", "properties": _keys(n), "required": [*_keys(n)]},
        12_000,
    ),
    "counted properties": (lambda n: {"type": "object", "properties": _keys(n), "minProperties": 2}, 10_000),
    "objects in objects": (
        lambda n: _nested(n, {}, lambda x: {"type": "object", "required": ["a"], "properties": {"a": x}}),
        31,
    ),
    "arrays in arrays": (lambda n: _nested(n, {}, lambda x: {"type": "array", "items": x}), 63),
    "anyOf in anyOf": (lambda n: _nested(n, {"type": "string"}, lambda x: {"anyOf": [{"type": "null"}, x]}), 31),
    "wide anyOf": (lambda n: {"anyOf": [{"type": "array", "items": {"const": k}} for k in range(n)]}, 11_000),
    "oneOf": (
        lambda n: {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}, f"a{k}": {}}, "required": ["k"]}
                for k in range(n)
            ]
        },
        5_000,
    ),
    "allOf of anyOf": (
        lambda n: {"allOf": [{"anyOf": [{"properties": {f"{k}{j}": {}}} for j in "ab"]} for k in range(n)]},
        8_000,
    ),
    "chained definitions": (
        lambda n: {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{k}": {"type": "array", "items": {"$ref": f"#/$defs/d{(k + 1) % n}"}} for k in range(n)},
        },
        9_000,
    ),
    "chained references": (
        lambda n: {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(n)} | {f"d{n}": {}},
        },
        15_000,
    ),
    "a definition of itself": (
        lambda n: {
            "$defs": {f"d{k}": {"items": {"$ref": "#"}} for k in range(n)},
            "anyOf": [{"$ref": f"#/$defs/d{k}"} for k in range(n)],
        },
        8_000,
    ),
    "enum": (lambda n: {"enum": [f"v{k}" for k in range(n)]}, 50_000),
    "enum of objects": (lambda n: {"enum": [{"id": k, "name": f"n{k}"} for k in range(n)]}, 15_000),
    "const": (lambda n: {"const": "a" * n}, 500_000),
    "a long key": (lambda n: {"type": "object", "properties": {"a" * n: {}}, "required": ["a" * n]}, 240_000),
    "prefixItems": (lambda n: {"type": "array", "prefixItems": [{"type": "null"}] * n, "minItems": n}, 25_000),
    "patterns": (
        lambda n: {
            "type": "object",
            "properties": {f"p{k}": {"type": "string", "pattern": f"^a{k}.*b$"} for k in range(n)},
        },
        9_000,
    ),
    "patterns together": (lambda n: {"type": "string", "allOf": [{"pattern": f"p{k}"} for k in range(n)]}, 20_000),
    "a long pattern": (lambda n: {"type": "string", "pattern": "(a|b)?c" * n}, 70_000),
    "a nested pattern": (lambda n: {"type": "string", "pattern": _text("(a", "b", ")*")(n)}, 100_000),
    "repeated patterns": (lambda n: {"type": "string", "pattern": _text("(", "a", "{1,9999}){1,9999}")(n)}, 60),
    "a lookback of n": (lambda n: {"type": "string", "pattern": f"^(.*a.{{{n}}})$"}, 10_000),
    "patternProperties": (
        lambda n: {"type": "object", "patternProperties": {f"^p{k}.*z{k}": {"type": "integer"} for k in range(n)}},
        5,
    ),
    "numbers": (
        lambda n: {"anyOf": [{"type": "number", "minimum": k + 0.001, "maximum": k * k + 7} for k in range(n)]},
        8_000,
    ),
    "minLength": (
        lambda n: {"type": "array", "items": {"type": "string", "minLength": n, "maxLength": n * 2}},
        500_000,
    ),
    "minItems": (
        lambda n: {"type": "array", "items": {"type": "integer"}, "minItems": n, "maxItems": n + 9},
        500_000,
    ),
    "uniqueItems": (lambda n: {"type": "array", "items": {"enum": list(range(n))}, "uniqueItems": True}, 64),
}

GRAMMARS: dict[str, tuple[Make, int]] = {
    "chained rules": (lambda n: _rules(n, '"a" {next}'), 14_000),
    "chained rules, to the left": (lambda n: _rules(n, '{next} "a"'), 14_000),
    "chained rules that may be empty": (lambda n: _rules(n, '"a"? {next}'), 14_000),
    "chained terminals": (lambda n: _rules(n, '"a" {next}', "T0", name="T"), 14_000),
    "chained terminals with bars": (lambda n: _rules(n, '"a" | {next}', "T0", name="T"), 14_000),
    "groups in groups": (lambda n: "start: " + _text('("b" ', '"a"', ")?")(n), 34_000),
    "brackets in brackets": (lambda n: "start: " + _text("[", '"a"', "]")(n), 130_000),
    "complements": (lambda n: "start: T\nT: " + _text("~(", '"a"', ")")(n), 80_000),
    "an expression in groups": (lambda n: f"start: /{_text('(b', 'a', ')?')(n)}/", 60_000),
    "repetitions of repetitions": (lambda n: "start: " + _text("(", '"a"', "){1,9999}")(n), 60),
    "a literal": (lambda n: f'start: "b" "{"a" * n}"', 250_000),
    "a sequence": (lambda n: "start: " + '"a" ' * n, 60_000),
    "alternatives": (lambda n: "start: " + " | ".join(f'"a{k}" "b"' for k in range(n)), 18_000),
    "empty rules": (
        lambda n: "start: " + " ".join(f"r{k}" for k in range(n)) + "".join(f'\nr{k}: "a"?' for k in range(n)),
        11_000,
    ),
    "lazy rules": (
        lambda n: (
            "start: " + " ".join(f"r{k}" for k in range(n)) + "".join(f"\nr{k}[lazy]: /.*{k}/" for k in range(n))
        ),
        8_000,
    ),
    "%json: properties": (_json(lambda n: {"type": "object", "properties": _keys(n)}), 8_000),
    "%json: required properties": (
        _json(lambda n: {"type": "object", "properties": _keys(n), "required": [*_keys(n)]}),
        6_000,
    ),
    "%json: definitions": (_json(SCHEMAS["chained definitions"][0]), 4_500),
    "%json: references": (_json(SCHEMAS["chained references"][0]), 7_000),
    "%json: enum": (_json(SCHEMAS["enum"][0]), 25_000),
    "%json: nested": (lambda n: "start: %json " + _text('{"items":', "{}", "}")(n), 25_000),
    "%json: allOf of anyOf": (_json(SCHEMAS["allOf of anyOf"][0]), 4_000),
    "%json: patterns together": (_json(SCHEMAS["patterns together"][0]), 9_000),
    "many %json": (lambda n: "start: " + " | ".join(f'%json {{"const": {k}}}' for k in range(n)), 9_000),
    "%regex: a part of a text": (
        lambda n: 'start: S\nS: %regex {"substring_chars": "' + "abcdef" * (n // 6) + '"}',
        250_000,
    ),
}

EXPRESSIONS: dict[str, tuple[Make, int]] = {
    "groups": (_text("(", "a", ")"), 32_000),
    "groups that may be missing": (_text("(b", "a", ")?"), 16_000),
    "a sequence": (lambda n: "ab?" * n, 21_000),
    "bars": (lambda n: "|".join(f"x{k}y" for k in range(n)), 9_000),
    "repetitions of repetitions": (_text("(", "a", "{1,9999}){1,9999}"), 60),
    "classes": (lambda n: "[a-c\\w]" * n, 9_000),
    "a lookback of n": (lambda n: f"(.*a.{{{n}}})", 10_000),
    "a literal": (lambda n: "a" * n, 65_000),
}

CHOICES: dict[str, tuple[Make, int]] = {
    "many": (lambda n: [f"choice {k}" for k in range(n)], 30_000),
    "long": (lambda n: [letter * n for letter in "abcdefgh"], 60_000),
    "one": (lambda n: ["ab" * n], 250_000),
    "beginnings of each other": (lambda n: ["a" * k for k in range(1, n)], 1_000),
}


def _calls(schema: Make) -> Make:
    def make(n: int) -> Any:
        call = {"name": "f", "strict": True, "begin": "<call>", "end": "</call>", "schema": schema(n)}
        return {"trigger": "<call>", "calls": [call], "least": 1, "most": None}

    return make


def _tools(n: int) -> Any:
    begun = [
        {"name": f"f{k}", "strict": True, "begin": f"<call>f{k}", "end": "</call>", "schema": {"type": "object"}}
        for k in range(n)
    ]
    return {"trigger": "<call>", "calls": begun, "least": 0, "most": None}


def _arguments(n: int) -> Any:
    listed = [{"key": f"a{k}", "needed": True, "schema": {"type": "integer"}} for k in range(n)]
    tags = {"begin": "<p=", "after": ">", "end": "</p>", "between": ",", "quotes": ""}
    call = {"name": "f", "strict": True, "begin": "<call>", "end": "</call>", "arguments": listed, "tags": tags}
    return {"trigger": "<call>", "calls": [call], "least": 1, "most": 1}


CALLS: dict[str, tuple[Make, int]] = {
    **{f"a tool: {name}": (_calls(make), most * 9 // 10) for name, (make, most) in SCHEMAS.items() if most > 64},
    "tools": (_tools, 4_000),
    "arguments": (_arguments, 6_000),
}

KINDS = {"json_schema": SCHEMAS, "grammar": GRAMMARS, "regex": EXPRESSIONS, "choice": CHOICES, "calls": CALLS}


def random_schema(rng: random.Random, depth: int = 4) -> Any:
    """A schema of every keyword that is served, and of some that are not; wide now and then."""

    def inner() -> Any:
        return random_schema(rng, depth - 1)

    def several(most: int = 4) -> range:
        return range(
            rng.choice([0, 1, 2, most, rng.choice([most, 30 * most])]) if depth == 4 else rng.randint(0, 3)
        )

    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "true", "ref", "pattern", "odd"]
    kinds += ["object", "array", "anyOf", "allOf", "oneOf", "map"] * 2 if depth else []
    match rng.choice(kinds):
        case "object":
            names = [rng.choice(["a", "b c", "ü", '"', "p"]) + str(k) for k in several(20)]
            made: dict[str, Any] = {"type": "object", "properties": {name: inner() for name in names}}
            if rng.random() < 0.5:
                made["required"] = [name for name in names if rng.random() < 0.5]
            if rng.random() < 0.5:
                made["additionalProperties"] = rng.choice([True, False, inner()])
            if rng.random() < 0.2:
                made[rng.choice(["minProperties", "maxProperties"])] = rng.choice([0, 1, 3, 50, 10**6])
            return made
        case "map":
            patterns = {rng.choice(["^a", "b$", "^[a-z]+$", ".", "(x|y)z"]): inner() for _ in several(2)}
            return {"type": "object", "patternProperties": patterns, "propertyNames": {"maxLength": 9}}
        case "array":
            made = {"type": "array", "items": inner()}
            if rng.random() < 0.4:
                made[rng.choice(["minItems", "maxItems"])] = rng.choice([0, 1, 5, 1000, 10**7])
            if rng.random() < 0.3:
                made["prefixItems"] = [inner() for _ in several(10)]
            return made | ({"uniqueItems": True} if rng.random() < 0.2 else {})
        case ("anyOf" | "allOf" | "oneOf") as key:
            return {key: [inner() for _ in several(5)]}
        case "enum":
            return {"enum": [rng.choice([k, str(k), {"k": k}, None, [k], k / 7]) for k in several(100)]}
        case "const":
            return {"const": rng.choice(["a" * rng.choice([1, 100, 5000]), 1e300, {}, [[]], "\u2028\x00"])}
        case "ref":
            return {"$ref": rng.choice(["#", "#/$defs/x", "#/$defs/y", "#/properties/a0", "#/nowhere"])}
        case "pattern":
            parts = [
                "[a-z]",
                ".",
                "a{2,400}",
                "(x|yz)*",
                "\\d+",
                "^",
                "$",
                "(?=a)",
                "\\bw",
                "[^\\x00-z]",
                "(",
                "é",
            ]
            return {"type": "string", "pattern": "".join(rng.choices(parts, k=rng.choice([1, 3, 60])))}
        case "string":
            return {
                "type": "string",
                **rng.choice([{}, {"minLength": rng.choice([3, 10**5])}, {"format": "date-time"}]),
            }
        case ("integer" | "number") as kind:
            low, high = (rng.choice([0, -1, 0.1, 10**6, 1e-9, -(10**20), 10**300]) for _ in range(2))
            more: dict[str, Any] = rng.choice([{}, {"multipleOf": rng.choice([7, 0.25, 9973, 0])}])
            return {"type": kind, "minimum": low, "exclusiveMaximum": high, **more}
        case "odd":
            return rng.choice(
                [{"not": {}}, {"type": "nothing"}, {"format": 7}, {"items": 3}, 5, {"type": ["null", "array"]}]
            )
        case "true":
            return rng.choice([True, False, {}])
        case kind:
            return {"type": kind}


def outcome(tokenizer: Tokenizer, kind: Any, value: Any) -> str | list[str]:
    """What becomes of a constraint. Compiles, and takes some steps; forks, steps back and drops what it made."""
    try:
        state = compile_constraint(Constraint(kind, value), tokenizer)
        mask, rng = np.zeros(-(-tokenizer.vocab_size // 32), np.int32), random.Random(0)
        for step in range(6):
            state.fill_mask(mask)
            if state.finished:
                break
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            state.consume(int(rng.choice(np.flatnonzero(bits))))
            state.fork()
            if step == 3:
                state.rollback(2)
    except InvalidRequest as error:
        return [error.field, error.limit, error.value]
    return "served"


def main(kind: str, n: int = 0) -> None:
    tokenizer = Tokenizer(samples.byte_level(), special_tokens={"eos_token": "<|im_end|>"}, eos_token_ids=[0, 2])
    if kind == "random":
        for seed in range(n):
            rng = random.Random(seed)
            schema = random_schema(rng)
            if isinstance(schema, dict):
                schema["$defs"] = {"x": random_schema(rng, 2), "y": random_schema(rng, 2)}
            print(json.dumps([seed, outcome(tokenizer, "json_schema", schema)]), flush=True)
        return
    for name, (make, most) in KINDS[kind].items():
        for size in sorted({1 + most // 10, most}):
            print(json.dumps([f"{name}, {size}", outcome(tokenizer, kind, make(size))]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
