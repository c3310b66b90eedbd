"""JSON schemas against a validator: random walks end in documents that it accepts, and never in a dead end."""

from __future__ import annotations

import json
import os
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from petiole.gpu_worker.constraints.schema import parsing
from petiole.gpu_worker.constraints.schema.intersection import MAX_ALTERNATIVES
from petiole.gpu_worker.constraints.schema.object_keys import MAX_PATTERNS
from petiole.gpu_worker.exceptions import InvalidRequest
from tests.gpu_worker.constraints.schemas import random_schema
from tests.gpu_worker.constraints.walking import ConstraintState, accepts, compiled, draw
from tests.support.trials import rest

CHECKED_FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "ipv6", "email"])


def of(schema: Any) -> ConstraintState:
    return compiled("json_schema", schema)


def validate(text: str, schema: Any) -> None:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    document = json.loads(text, parse_float=Decimal)
    draft = jsonschema.validators.validator_for(exact, jsonschema.Draft202012Validator)
    draft(exact, format_checker=CHECKED_FORMATS).validate(document)


def check_walks(seed: int) -> bool:
    """Whether the schema of this seed allows anything."""
    schema = random_schema(random.Random(seed))
    try:
        state = of(schema)
    except InvalidRequest as error:
        nothing = error.limit == "must allow a value"
    else:
        for k in range(3):
            validate(draw(state.fork(), random.Random(7 * seed + k)), schema)
        return True
    assert nothing
    return False


WALKS = int(os.environ.get("PETIOLE_WALKS", "250"))
"""Seeds of random schemas; more by hand."""


@pytest.mark.parametrize("seeds", rest([range(50), range(50, WALKS)]), ids=str)
def test_random_walks_of_random_schemas_end_in_valid_documents(seeds: range) -> None:
    served = [check_walks(seed) for seed in seeds]
    assert sum(served) >= 0.8 * len(seeds)


@pytest.mark.parametrize(
    ("schema", "documents", "barred"),
    [
        (  # keys that are named, match patterns, or neither
            {
                "properties": {"ab": {"type": "integer"}},
                "patternProperties": {
                    "^a": {"maximum": 5, "type": "number"},
                    "b$": {"minimum": 0, "type": "number"},
                },
                "additionalProperties": {"type": "null"},
                "type": "object",
            },
            ['{"ab":3}', '{"ab":3,"a":-2.5}', '{"b":9.5}', '{"aab":1.5,"c":null}', '{"a":1,"xb":7,"cc":null}'],
            ['{"ab":6}', '{"ab":1.5}', '{"a":6}', '{"b":-1}', '{"aab":-1}', '{"aab":6}', '{"c":1}', '{"a":null}'],
        ),
        (  # the pattern matches no other key: no comma can follow
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "patternProperties": {"^a$": {"type": "number"}},
                "additionalProperties": False,
            },
            ['{"a":1}', "{}"],
            ['{"a":1,'],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["red", "green"]}, "additionalProperties": {"const": 1}},
            ["{}", '{"red":1,"green":1}', '{"green":1}'],
            ['{"blue":1}', '{"red":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
            | {"minProperties": 1, "maxProperties": 2},
            ['{"a":1}', '{"a":1,"c":2}', '{"b":0}'],
            ["{}", '{"a":1,"b":1,"c":1}'],
        ),
        (
            {"type": "array", "items": {"enum": ["x", "y", 3]}, "uniqueItems": True, "minItems": 2},
            ['["x","y"]', '["y","x",3]'],
            ["[]", '["x"]', '["x","x"]', '["x","y","x"]'],
        ),
        (
            {"oneOf": [{"required": ["k"], "properties": {"k": {"const": k}}, "type": "object"} for k in "ab"]},
            ['{"k":"a"}', '{"k":"b","l":1}'],
            ["{}", '{"k":"c"}'],
        ),
        (  # definitions that meet within themselves
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    "a": {"type": "object", "properties": {"c": {"$ref": "#/$defs/a"}, "x": {"minimum": 1}}},
                    "b": {
                        "type": "object",
                        "properties": {"c": {"$ref": "#/$defs/b"}, "x": {"type": "integer"}},
                        "additionalProperties": False,
                    },
                },
            },
            ["{}", '{"c":{"c":{"x":1}}}', '{"x":4}'],
            ['{"x":0}', '{"c":{"c":{"x":0}}}', '{"y":1}', '{"c":1}'],
        ),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[]", "[1]"], ["[1,1]", "[2]"]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"const": 1}]}
            | {"additionalItems": {"const": 2}},
            ["[1,2,2]"],
            ["[1,1]"],
        ),
        ({"type": ["integer", "string"], "maximum": 3, "maxLength": 2}, ["3", '"ab"'], ["4", '"abc"', "null"]),
        ({"enum": ["ab", "b", 3], "pattern": "^a"}, ['"ab"', "3"], ['"b"']),
        ({"properties": {"a": False}, "type": "object"}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"$ref": "#part", "$defs": {"p": {"$anchor": "part", "const": 5}}}, ["5"], ["6"]),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"const": 5}}, "default": {"id": "#/$defs/p"}}, ["5"], ["6"]),
        (  # options that exclude each other by a property behind one that contains them
            {
                "$defs": {
                    "tree": {
                        "oneOf": [
                            {
                                "type": "object",
                                "properties": {"left": {"$ref": "#/$defs/tree"}, "kind": {"const": "branch"}},
                                "required": ["left", "kind"],
                            },
                            {"type": "object", "properties": {"kind": {"const": "leaf"}}, "required": ["kind"]},
                        ]
                    }
                },
                "$ref": "#/$defs/tree",
            },
            ['{"kind":"leaf"}', '{"left":{"kind":"leaf"},"kind":"branch"}'],
            ['{"kind":"branch"}', '{"left":{"kind":"branch"},"kind":"branch"}', '{"kind":"root"}'],
        ),
        ({"properties": {"__type__": {"const": 1}, "__value__": {"const": 2}}, "type": "object"}
         | {"required": ["__type__", "__value__"], "additionalProperties": False},
         ['{"__type__":1,"__value__":2}'], ["{}"]),
    ],
)  # fmt: skip
def test_what_a_schema_allows(schema: Any, documents: list[str], barred: list[str]) -> None:
    state = of(schema)
    assert [text for text in documents if not accepts(state, text)] == []
    assert [text for text in barred if accepts(state, text)] == []
    for text in documents:
        validate(text, schema)


# --- sizes ------------------------------------------------------------------------------------------------------


def test_ten_thousand_choices() -> None:
    choices = [f"choice number {k}" for k in range(10_000)]
    state = compiled("choice", choices)
    assert accepts(state, choices[0])
    assert accepts(state, choices[-1])
    assert not accepts(state, "choice number 10000")


@pytest.mark.parametrize("more", [False, True])
def test_a_thousand_optional_properties(more: bool) -> None:
    properties = {f"property_{k}": {"type": "integer"} for k in range(1000)}
    state = of({"type": "object", "properties": properties, "additionalProperties": more})
    assert accepts(state, '{"property_3":1,"property_500":2,"property_999":3}')
    assert not accepts(state, '{"property_500":1,"property_3":2}')
    assert accepts(state, '{"other":null}') == more


def test_an_enum_of_thousands_of_objects() -> None:
    values = [{"id": k, "name": f"n{k % 50}"} for k in range(2500)]
    state = of({"type": "object", "properties": {"of": {"enum": values}}, "required": ["of"]})
    for value in (values[0], values[1234], values[-1]):
        assert accepts(state, json.dumps({"of": value}))
    assert not accepts(state, '{"of":{"id":7,"name":"n8"}}')


# --- refusals ---------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("wrapped", "instead"),
    [
        ({"name": "answer", "schema": SCHEMA, "strict": True}, "its 'schema'"),
        ({"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}, "of its 'json_schema'"),
        ({"name": "weather", "description": "Now", "parameters": SCHEMA}, "its 'parameters'"),
        ({"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}, "of its 'function'"),
        ({"type": "function", "name": "weather", "parameters": SCHEMA}, "its 'parameters'"),
        ({"name": "weather", "input_schema": SCHEMA}, "its 'input_schema'"),
    ],
)
def test_a_wrapped_schema_is_refused_with_a_hint(wrapped: Any, instead: str) -> None:
    with pytest.raises(InvalidRequest, match=f"this object contains one: give .*{instead}, got "):
        of(wrapped)


@pytest.mark.parametrize("schema", [{"foo": 1}, {"properties": {"a": {"typ": "string"}}}, {"items": {"min": 3}}])
def test_a_schema_without_a_known_keyword_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"must have a keyword of JSON schema \(\{\} allows any value\)"):
        of(schema)


@pytest.mark.parametrize(
    "schema", [{}, True, {"title": "Anything"}, {"description": "x", "foo": 1}, {"x-order": 2}]
)
def test_a_schema_may_allow_any_value(schema: Any) -> None:
    assert accepts(of(schema), '{"a":[1,"b",null]}')


def test_a_pattern_takes_time_in_proportion_to_a_key() -> None:
    """Python's own expressions would take 2^60 steps."""
    key = "a" * 60 + "!"
    schema = {"type": "object", "properties": {key: {"const": 1}}, "patternProperties": {"^(a+)+$": {"const": 2}}}
    assert accepts(of(schema), json.dumps({key: 1, "aa": 2}, separators=(",", ":")))


@pytest.mark.parametrize("keyword", sorted(parsing.REFUSED))
def test_what_cannot_be_enforced_is_said_by_name(keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"items\.{keyword.replace('$', '.')}: cannot be enforced"):
        of({"type": "array", "items": {keyword: {}}})


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: must have options that exclude each other"),
        ({"type": "string", "format": "uri-reference"}, "format: must be one of .*uuid4.*, got uri-reference"),
        ({"$ref": "https://example.com/schema"}, r"\$ref: must name a part of this schema"),
        ({"pattern": "a(?=b)"}, "pattern: .*look-around"),
        ({"patternProperties": {"a(?=b)": {}}}, "patternProperties: .*look-around"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "must allow a value"),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}, "type": "object"}, "must allow a value"),
        ({"oneOf": [{"$ref": "#"}, {"type": "null"}]}, "oneOf: must have options that exclude each other"),
        ({"type": [["string"]]}, r"type: must be one of .*, got \['string'\]"),
        ({"allOf": [{"$ref": f"#/allOf/{'9' * 5000}"}]}, r"\$ref: must name a part of this schema"),
        ({"properties": {"exclusive": {"minimum": True}}}, "minimum: must be a number, got True"),
        (
            {
                "allOf": [{"$ref": "#/$defs/0"}],
                "$defs": {str(k): {"anyOf": [{"$ref": f"#/$defs/{k + 1}"}] * 2} for k in range(60)} | {"60": {}},
            },
            f"must combine at most {MAX_ALTERNATIVES} alternatives",
        ),
        ({"minItems": -1}, "minItems: must be a whole number of at least 0, got -1"),
        ({"properties": []}, "properties: must be an object, got list"),
        ({"enum": "ab"}, "enum: must be a list, got str"),
        ({"multipleOf": 0}, "multipleOf: must not be 0"),
        ({"type": "object", "minProperties": 10**9}, "must have at most 20000 properties times"),
        ({"type": "array", "prefixItems": [{}] * 50_000}, "must have at most 400000 prefixItems times"),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {str(k): {"$ref": f"#/$defs/{k + 1}"} for k in range(2000)} | {"2000": {}},
            },
            "must be nested less deeply, with its references",
        ),
        (
            {"propertyNames": {"anyOf": [{"pattern": "a"}, {"pattern": "b"}]}},
            "propertyNames: must be one kind of text",
        ),
        ({"patternProperties": {f"^{k}": {} for k in range(9)}}, f"must have at most {MAX_PATTERNS} patternProp"),
        (
            {"allOf": [{"anyOf": [{"pattern": f"^{k}", "maxLength": j} for k in range(500)]} for j in (5, 6)]},
            f"must combine at most {MAX_ALTERNATIVES} alternatives",
        ),
    ],
)
def test_a_bad_schema_is_refused_by_name(schema: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as refusal:
        of(schema)
    assert refusal.value.field.startswith("constraint.json_schema")
