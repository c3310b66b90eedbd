"""Random tools, with schemas of every shape that says which types a parameter has, and arguments for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NULL = {"type": "null"}
MARKS = ["a </parameter> b", "a\n</parameter>\nb", "</arg_value>", "</tool_call>", "</function>", "<parameter=x"]
TEXTS = st.sampled_from(
    [
        "Paris",
        "",
        "a\nb",
        '"',
        "\\",
        "é😀",
        "]}",
        " a ",
        "it's",
        "<b>",
        "null",
        "1",
        "true",
        '"2024"',
        "\n",
        *MARKS,
    ]
)
PLAIN_TEXTS = st.sampled_from(["Paris", "a b", "é😀", "it's", "a </parameter> b", "x </arg_value>", "a\nb"])
NAMES = st.text(alphabet="aB9é日 _-$@.:/<>{}()[]='\"\\,", min_size=1, max_size=8)
NUMBERS = st.integers(-99, 10**6) | st.sampled_from([0.5, -2.25, 1e-7])
INNER = st.dictionaries(
    st.sampled_from(["x", "y_z"]), st.integers(0, 9) | st.just("t") | st.booleans(), max_size=2
)


@dataclass(frozen=True)
class Shape:
    """A schema, and values that it allows. A text beside other types has no look of one of them: a template writes
    both alike."""

    schema: Any
    values: st.SearchStrategy[Any]


def _leaf(schema: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Shape]:
    return st.just(Shape(schema, values))


TEXT = _leaf({"type": "string"}, TEXTS)
PLAIN_TEXT = _leaf({"type": "string"}, PLAIN_TEXTS)
OTHERS = st.one_of(
    _leaf({"type": "integer"}, st.integers(-(10**6), 10**6)),
    _leaf({"type": "number"}, NUMBERS),
    _leaf({"type": "boolean"}, st.booleans()),
    _leaf({"type": "object"}, INNER),
    _leaf({"type": "array", "items": {"type": "integer"}}, st.lists(st.integers(0, 9), max_size=3)),
    _leaf({"enum": [1, 2]}, st.sampled_from([1, 2])),
    _leaf({"const": 7}, st.just(7)),
)
LISTED = st.one_of(
    _leaf({"enum": ["1", "2"]}, st.sampled_from(["1", "2"])),
    _leaf({"type": "string", "enum": ["a b", "null"]}, st.sampled_from(["a b", "null"])),
    _leaf({"const": "2024"}, st.just("2024")),
)


def _wrapped(shape: Shape, way: str, defs: dict[str, Any]) -> Shape:
    if way == "$ref":
        name = f"D{len(defs)}"
        defs[name] = shape.schema
        return Shape({"$ref": f"#/$defs/{name}"}, shape.values)
    return shape if way == "as it is" else Shape({way: [shape.schema]}, shape.values)


@st.composite
def shapes(draw: st.DrawFn, defs: dict[str, Any]) -> Shape:
    """A type by itself, behind references and `allOf`, or beside null or another one."""
    alone = draw(st.booleans())
    shape = draw(TEXT | LISTED | OTHERS if alone else PLAIN_TEXT | OTHERS)
    for way in draw(st.lists(st.sampled_from(["$ref", "allOf", "anyOf", "oneOf"]), max_size=3)):
        shape = _wrapped(shape, way, defs)
    if alone:
        return shape
    other = draw(_leaf(NULL, st.none()) | PLAIN_TEXT | OTHERS)
    ways = ["anyOf", "oneOf"] if other.schema is NULL else ["anyOf"]  # options of `oneOf` exclude each other
    schema = {draw(st.sampled_from(ways)): draw(st.permutations([shape.schema, other.schema]))}
    both = Shape(schema, shape.values | other.values)
    return _wrapped(both, draw(st.sampled_from(["as it is", "$ref", "allOf"])), defs)


@dataclass(frozen=True)
class Drawn:
    """Tools, and a call of one of them."""

    tools: list[dict[str, Any]]
    name: str
    arguments: dict[str, Any]


@st.composite
def calls(draw: st.DrawFn, names: Callable[[str], bool], keys: Callable[[str], bool]) -> Drawn:
    """`names`, `keys`: the names that a tool and a parameter may have."""
    tools, arguments = list[dict[str, Any]](), dict[str, Any]()
    for name in draw(st.lists(NAMES.filter(names), min_size=1, max_size=3, unique=True)):
        defs: dict[str, Any] = {}
        given = draw(st.dictionaries(NAMES.filter(keys), shapes(defs), max_size=3))
        needed = [key for key in given if draw(st.booleans())]
        arguments = {
            key: draw(shape.values) for key, shape in given.items() if key in needed or draw(st.booleans())
        }
        properties = {key: shape.schema for key, shape in given.items()}
        schema = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
        tools.append({"name": name, "parameters": {**schema, **({"$defs": defs} if defs else {})}})
    return Drawn(tools, tools[-1]["name"], arguments)


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is not true."""
    return json.dumps(one) == json.dumps(other)
