"""Enforced calls and their reader agree: what a grammar allows is read as a call by the schema, and a call by the
schema is allowed."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st

from petiole.gpu_worker.constraints import compile_constraint
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.text import Tokenizer
from petiole.tasks.output_parsing import message
from petiole.tasks.output_parsing.formats import FAMILIES
from petiole.tasks.output_parsing.types import EVERY, Schema, types_of
from petiole.tasks.output_parsing.writing import WRITINGS, composed
from tests.gpu_worker.constraints.test_calls import ENFORCED, accepted
from tests.support.tokenizers import byte_level
from tests.support.tools import Drawn, calls, same
from tests.support.written import WRITERS, Said

SINGLE = sorted(name for name in ENFORCED if name != "harmony")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})


def drawn_call(name: str, data: st.DataObject) -> Drawn:
    template = FAMILIES[name].template
    return data.draw(calls(template.carries_name, lambda key: template.carries_key(key, inside=False)))


def grammar_of(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    strict = [{**tool, "strict": True} for tool in tools]
    return composed(WRITINGS[name], strict, least=1, most=1, answer=None)


def read(name: str, text: str, tools: list[dict[str, Any]]) -> tuple[str, Any]:
    """The one call in an output that has nothing else."""
    found = message.read(FAMILIES[name], text, tools=types_of(tools))
    [call] = found.calls
    assert call.complete, text
    assert not found.content.strip(), text
    return call.name, json.loads(call.arguments)


def enforced(name: str, drawn: Drawn) -> dict[str, Any]:
    """The arguments of which a template writes what is enforced: text beside other types is JSON in tags."""
    tags, tool = WRITINGS[name].tags, drawn.tools[-1]
    if tags is None or tags.as_json:
        return drawn.arguments
    root, found = Schema(tool["parameters"]), {}
    for key, value in drawn.arguments.items():
        values = root.values(tool["parameters"]["properties"][key])
        mixed = values.listed is None and not values.kinds <= {"string", "null"} and values.kinds != EVERY.kinds
        found[key] = json.dumps(value, ensure_ascii=False) if mixed and isinstance(value, str) else value
    return found


@pytest.mark.parametrize("name", sorted({*SINGLE} - {"gemma3", "gemma4"}))
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_call_by_the_schema_is_allowed(tokenizer: Tokenizer, name: str, data: st.DataObject) -> None:
    drawn = drawn_call(name, data)
    text = WRITERS[name](Said(calls=[(drawn.name, enforced(name, drawn))]))
    assert accepted(tokenizer, grammar_of(name, drawn.tools), text), text
    called, arguments = read(name, text, drawn.tools)
    assert called == drawn.name
    assert same(arguments, drawn.arguments), text


def pieces_of(text: str, tools: list[dict[str, Any]]) -> list[str]:
    """What a model may try to write: marks, names, values, and whole tags."""
    marks = [
        "</parameter>",
        "\n</parameter>\n",
        "</function>",
        "</tool_call>",
        "<tool_call>\n<function=",
        "<parameter=",
    ]
    marks += [
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '<|"|>',
        '"',
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        " ",
        "\n",
    ]
    marks += [
        "1",
        "2",
        "7",
        "-0.5",
        "1e3",
        "null",
        "true",
        "False",
        "a",
        "é",
        "2024",
        '"1"',
        "x",
        "y_z",
        "a b",
        "(",
        ")",
        "=",
    ]
    keys = [key for tool in tools for key in tool["parameters"]["properties"]]
    tags = [f"<parameter={key}>\n" for key in keys] + [f"<arg_key>{key}</arg_key>\n<arg_value>" for key in keys]
    return [*marks, *keys, *tags, text]


def walked(state: ConstraintState, tokenizer: Tokenizer, pieces: list[str], whole: str, seed: int) -> str | None:
    """A random output: some pieces, and then the longest end of a whole one. None: none of its ends may come."""
    rng, said = random.Random(seed), ""

    def after(state: ConstraintState, text: str) -> ConstraintState | None:
        copy = state.fork()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return copy if all(copy.consume(token) for token in ids) else None

    for _ in range(rng.randrange(60)):
        piece = rng.choice(pieces)
        for size in range(len(piece), 0, -1):
            if (further := after(state, piece[:size])) is not None:
                state, said = further, said + piece[:size]
                break
    for at in range(len(whole) + 1):
        if (further := after(state, whole[at:])) is not None and further.consume(min(tokenizer.eos_token_ids)):
            return said + whole[at:]
    return None


@pytest.mark.parametrize("name", SINGLE)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_what_is_allowed_is_read_as_a_call_by_the_schema(
    tokenizer: Tokenizer, name: str, data: st.DataObject
) -> None:
    drawn = drawn_call(name, data)
    whole = WRITERS[name](Said(calls=[(drawn.name, enforced(name, drawn))]))
    state = compile_constraint(
        Constraint("calls", {**grammar_of(name, drawn.tools), "thinks": "closed"}), tokenizer
    )
    pieces = [*pieces_of(whole, drawn.tools), *(whole[at : at + 7] for at in range(0, len(whole), 7))]
    text = walked(state, tokenizer, pieces, whole, data.draw(st.integers(0, 2**32)))
    if text is None:
        return
    called, arguments = read(name, text, drawn.tools)
    [tool] = [tool for tool in drawn.tools if tool["name"] == called]
    jsonschema.validate(arguments, tool["parameters"])
