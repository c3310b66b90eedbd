"""Calls as grammars: what a family writes is accepted, and nothing else."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from petiole.gpu_worker.constraints import compile_constraint
from petiole.gpu_worker.constraints.calls import shortest
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.text import Tokenizer
from petiole.tasks.output_parsing.formats import FAMILIES
from petiole.tasks.output_parsing.parser import CallEnded, Parser
from petiole.tasks.output_parsing.writing import WRITINGS, composed
from tests.support.tokenizers import byte_level
from tests.support.written import WRITERS, Said

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "weather", "parameters": CITY, "strict": True},
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
MARKS = [
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]",
    "[/THINK]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<|tool_call|>", "<|/tool_call|>", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<|channel>", "<channel|>",
]  # fmt: skip
ENFORCED = sorted(name for name, writing in WRITINGS.items() if writing.calls)


@pytest.fixture(scope="module", params=["special", "plain"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Marks may be tokens that are special, or plain text."""
    backend = byte_level()
    backend.add_special_tokens(["<eos>"])
    if request.param == "special":
        backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})


def accepted(tokenizer: Tokenizer, asked: Any, text: str, thinks: str = "free") -> bool:
    state = compile_constraint(Constraint("calls", {**asked, "thinks": thinks}), tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(state.consume(token) for token in ids) and state.consume(min(tokenizer.eos_token_ids))


def asked(name: str, least: int = 1, most: int | None = None, answer: Any = None) -> dict[str, Any]:
    return composed(WRITINGS[name], TOOLS, least=least, most=most, answer=answer)


def said(name: str, calls: Sequence[tuple[str, dict[str, Any]]], content: str = "", thought: str = "") -> str:
    return WRITERS[name](Said(content, thought, calls))


ONE: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "</tool_call>é", "days": 3})]
TWO: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Rome"}), ("now", {})]


@pytest.mark.parametrize("name", ENFORCED)
def test_what_a_family_writes_is_accepted_and_nothing_else(tokenizer: Tokenizer, name: str) -> None:
    grammar, single = asked(name), WRITINGS[name].most == 1
    assert accepted(tokenizer, grammar, said(name, ONE))
    assert accepted(tokenizer, grammar, said(name, TWO)) is not single
    assert not accepted(tokenizer, asked(name, most=1), said(name, TWO))
    for wrong in ([("rain", {})], [("weather", {})], [("weather", {"city": "x", "days": "y"})], []):
        assert not accepted(tokenizer, grammar, said(name, wrong, "Hello.")), wrong


@pytest.mark.parametrize("name", [name for name in ENFORCED if WRITINGS[name].trigger])
def test_where_a_call_may_come_text_may_come_too_but_no_other_call(tokenizer: Tokenizer, name: str) -> None:
    grammar = asked(name, least=0)
    assert accepted(tokenizer, grammar, said(name, [], "Hello < there."))
    assert accepted(tokenizer, grammar, said(name, ONE))
    assert not accepted(tokenizer, grammar, said(name, [("rain", {})]))
    if name != "harmony":
        assert accepted(tokenizer, grammar, said(name, ONE, "I look."))
        assert not accepted(tokenizer, grammar, said(name, [("weather", {"town": "x"})], "I look."))


UNMARKED = [name for name in ENFORCED if WRITINGS[name].begins]
PIECES = [
    "weather", "now", "rain", "\n", "{", "}", "{}", '{"city": "x"}', "[", "(", ")", "()", "]", 'city="x"', "city=",
    ", ", " ", "é", "-", "5", "a", ".",
]  # fmt: skip


@pytest.mark.parametrize("name", UNMARKED)
def test_a_call_without_a_mark_is_enforced_once_it_has_begun(tokenizer: Tokenizer, name: str) -> None:
    grammar = asked(name, least=0)
    for text in (
        "Hello.",
        "now",
        "weather\nis fine",
        "[weather]",
        "[rain()]",
        "rain\n{}",
        "aweather\n{}",
        "f(now()",
    ):
        assert accepted(tokenizer, grammar, text), text
    assert accepted(tokenizer, grammar, said(name, ONE, "I look at the weather."))
    assert accepted(tokenizer, grammar, said(name, TWO))
    assert not accepted(tokenizer, asked(name, least=0, most=1), said(name, TWO))
    for wrong in ({}, {"town": "x"}, {"city": 3}):
        assert not accepted(tokenizer, grammar, said(name, [("weather", wrong)], "I look."))


@pytest.mark.parametrize("name", UNMARKED)
@settings(max_examples=50)
@given(data=st.data())
def test_without_a_mark_a_call_has_begun_where_the_parser_says(
    tokenizer: Tokenizer, name: str, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    parser = Parser(FAMILIES[name].template, tools={"weather": {"city": "string"}, "now": {}})
    events = [*parser.push(text), *parser.finish()]
    ended = [event.complete for event in events if isinstance(event, CallEnded)]
    allowed = accepted(tokenizer, asked(name, least=0), text)
    if allowed:
        assert all(ended)
    else:
        assert ended, "text without calls is free"


@pytest.mark.parametrize("name", [name for name in ENFORCED if WRITINGS[name].thought])
def test_a_thought_comes_first_where_the_prompt_has_begun_it_or_the_model_may(
    tokenizer: Tokenizer, name: str
) -> None:
    text, thought = said(name, ONE, thought="hm {"), WRITINGS[name].thought
    assert thought is not None
    assert accepted(tokenizer, asked(name), text)
    assert accepted(tokenizer, asked(name), text.removeprefix(thought.open), "open")
    assert not accepted(tokenizer, asked(name), said(name, ONE), "open")
    assert not accepted(tokenizer, asked(name), text, "closed")


@pytest.mark.parametrize("name", ["gemma4", "qwen-xml"])
def test_arguments_that_are_left_out_leave_no_trace(tokenizer: Tokenizer, name: str) -> None:
    """In the order of the schema, whichever are there, and what is between two arguments only there."""
    kinds: dict[str, Any] = {
        "a": {"type": "string"}, "b": {"enum": ["x", "y"]}, "c": {"type": "array", "items": {"type": "integer"}},
        "d": {"type": "boolean"},
    }  # fmt: skip
    values = {"a": 'é", "b:<', "b": "y", "c": [1, 2], "d": True}
    for needed in ([], ["b"], ["a", "d"]):
        tool = {"name": "f", "parameters": {"type": "object", "properties": kinds, "required": needed}}
        grammar = composed(WRITINGS[name], [tool], least=1, most=1, answer=None)
        for k in range(16):
            given = {key: value for bit, (key, value) in enumerate(values.items()) if k >> bit & 1}
            assert accepted(tokenizer, grammar, said(name, [("f", given)])) is (given.keys() >= {*needed})
        assert not accepted(tokenizer, grammar, said(name, [("f", dict(reversed(values.items())))]))


def test_a_schema_follows_the_thought(tokenizer: Tokenizer) -> None:
    grammar = composed(WRITINGS["hermes"], (), least=0, most=None, answer=("json_schema", CITY))
    assert accepted(tokenizer, grammar, 'so {\n</think>\n\n{"city": "Rome"}', "open")
    assert not accepted(tokenizer, grammar, "so</think>\n\nRome", "open")
    assert accepted(tokenizer, grammar, '{"city": "Rome"}', "closed")
    assert not accepted(tokenizer, grammar, "Rome", "closed")
    either = asked("hermes", least=0, answer=("choice", ["yes", "no"]))
    assert [accepted(tokenizer, either, text) for text in ("yes", "maybe", said("hermes", TWO))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_enforced_is_read(name: str) -> None:
    """The parser finds complete calls in what the grammar allows: here in what it was tested with."""
    for calls in (ONE, TWO):
        parser = Parser(FAMILIES[name].template, tools={"weather": {"city": "string"}, "now": {}})
        ended = [
            event for event in [*parser.push(said(name, calls)), *parser.finish()] if isinstance(event, CallEnded)
        ]
        assert [one.complete for one in ended] == [True] * len(calls)


def test_a_schema_that_cannot_be_compiled_is_refused_where_the_tool_is_strict(tokenizer: Tokenizer) -> None:
    for strict in (True, False):
        tool = {"name": "f", "parameters": {"type": 7}, "strict": strict}
        grammar = composed(WRITINGS["hermes"], [tool], least=1, most=1, answer=None)
        text = said("hermes", [("f", {"a": 1})])
        if strict:
            with pytest.raises(InvalidRequest, match=r"tools\.f\.parameters"):
                accepted(tokenizer, grammar, text)
        else:
            assert accepted(tokenizer, grammar, text)


@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
def test_with_a_strict_tool_no_text_is_read_as_a_call(tokenizer: Tokenizer, name: str) -> None:
    call = '{"name": "weather", "arguments": {"city": 7}}'
    given = asked(name, least=0)
    for text in (f"```json\n{call}\n```", call, f"[{call}]", f"\n```\n{call}\n```"):
        assert not accepted(tokenizer, given, text)
        assert accepted(tokenizer, {**given, "whole": ""}, text)
    for text in ("```python\nprint([1])\n```", f"See {call}", "Hello {you}"):
        assert accepted(tokenizer, given, text)


@pytest.mark.parametrize("name", ENFORCED)
def test_the_shortest_call_is_one(tokenizer: Tokenizer, name: str) -> None:
    given = asked(name)
    assert accepted(tokenizer, given, shortest(given), "closed")
