"""Constraints in vLLM's words: what they allow is what Petiole's own grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from petiole.engines.vllm.wording import lark_of
from petiole.gpu_worker.constraints.compiler import source_of
from petiole.tasks.output_parsing.writing import WRITINGS, composed

BYTES = LLTokenizer("byte")
ONE = {"type": "object", "required": ["a"], "additionalProperties": False}
TEXT, NUMBER = ({**ONE, "properties": {"a": {"type": kind}}} for kind in ("string", "integer"))
VALUES = [
    (TEXT, ['{"a": "x"}', '{\n  "a": "x"\n}', '{"a": "x" }', ' {"a": "x"}', '{"a": "x"}\n', '{"a"\n\n: "x"}']),
    (NUMBER, ['{"a": 1}', '{\n  "a": 1\n}', '{"a": 1 \n}', '{"a": 1  \n  }', '{"a": 1' + " " * 40 + "}"]),
    ({"type": "array", "items": {"type": "string"}}, ['["x","y"]', '[\n  "x",\n  "y"\n]', "[]"]),
    ({"type": "object"}, ['{"a": [1, "x"]}', '{\n  "a": "x"\n}', '{"a":{"b":"x"\n}\n}']),
    ({"enum": ["T1: \nT2: x", "/@g0/"]}, ['"T1: \\nT2: x"', '"/@g0/"', '"other"']),
    ({}, ['{\n "a": "x"\n}', " 1", "1"]),
]


def accepted(grammar: str, text: str) -> tuple[int, bool]:
    """How many bytes it takes, and whether they are all of an output."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())), matcher.is_accepting()


@pytest.mark.parametrize(("schema", "text"), [(schema, text) for schema, texts in VALUES for text in texts])
def test_a_schema_allows_the_same(schema: dict[str, Any], text: str) -> None:
    own = source_of("json_schema", json.dumps(schema), frozenset())
    assert accepted(lark_of(own), text) == accepted(own, text)


@pytest.mark.parametrize("name", WRITINGS)
def test_calls_allow_the_same(name: str) -> None:
    value = composed(WRITINGS[name], [{"name": "f", "parameters": NUMBER}], least=1, most=2, answer=None)
    own = source_of("calls", json.dumps(value), frozenset())
    told = lark_of(own)
    first = LLMatcher(BYTES, own, log_level=0)
    for text in (first.compute_ff_bytes().decode(), json.dumps(value["calls"])[:200]):
        assert accepted(told, text) == accepted(own, text)


@pytest.mark.parametrize("grammar", ['?start: "a"', "start[max_tokens=5]: /a+/", '// first\nstart: "a"'])
def test_the_first_line_says_which_notation_it_is(grammar: str) -> None:
    told = lark_of(source_of("grammar", json.dumps(grammar), frozenset()))
    assert told.startswith("%llguidance {}\n")
    assert accepted(told, "a")[0] == 1
