"""Tools that take text are functions for the model, and text for the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.foreign import text_tools
from petiole.gateway.core.foreign.text_tools import InputReader
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.openai import chat_view
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.responses import items, resource
from petiole.gateway.openai.responses.request import CreateResponse, History, Times
from petiole.gateway.serving.request_body import as_request
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

PATCH = {
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}
HERE = ModelRoute("q", None)


@given(st.text(), st.booleans(), st.lists(st.integers(1, 9)))
def test_text_is_read_however_it_is_divided(text: str, ascii: bool, sizes: list[int]) -> None:
    text = text.encode(errors="ignore").decode()
    said, reader, found, at = json.dumps({"input": text}, ensure_ascii=ascii), InputReader(), "", 0
    for size in [*sizes, len(said)]:
        found += reader.push(said[at : at + size])
        at += size
    assert found + reader.finish() == text


@pytest.mark.parametrize("said", ["", "*** patch", '{"patch": "x"}', '{"input": 3}', "{"])
def test_arguments_of_another_form_are_the_text(said: str) -> None:
    reader = InputReader()
    assert "".join(map(reader.push, said)) + reader.finish() == said


def test_a_regular_expression_is_enforced_and_another_grammar_is_told() -> None:
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    made = text_tools.function("f", "t", {"format": regex})
    assert (made["strict"], made["parameters"]["properties"]["input"]["pattern"]) == (True, "^(?:a+)$")
    assert "start: /a/" in text_tools.function("f", "t", PATCH)["description"]


def ended(record: Any) -> CollectedOutput:
    delta = StreamDelta(
        task_id="t", attempt=1, index=0, token_ids=[1], text="", content="", finish_reason="stop",
        tool_calls=[{"index": 0, "id": "c1", "name": "apply_patch", "arguments": '{"input": "a\\nb"}'}],
    )  # fmt: skip
    whole = CollectedOutput()
    for part in OutputAssembler.of(record, 0).read(delta):
        whole.add(part)
    return whole


def test_a_chat_shows_a_call_of_the_tool() -> None:
    called = {"id": "c0", "type": "custom", "custom": {"name": "apply_patch", "input": "x"}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [called]}]
    asked = as_request(
        {"model": "m", "messages": said, "tools": [{"type": "custom", "custom": PATCH}, {"type": "web_search"}],
         "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}}}, ChatCompletion,
    )  # fmt: skip
    assert asked.ignored == ["tools.web_search"]
    plan = asked.plan("c", 1, HERE, False)
    options = plan.calls[0].options
    assert [tool["function"]["name"] for tool in options["tools"]] == ["apply_patch"]
    assert options["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    assert options["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"input": "x"}'
    [choice] = chat_view.whole(plan.record, [ended(plan.record)])["choices"]
    assert choice["message"]["tool_calls"] == [
        {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": "a\nb"}}
    ]


def test_a_response_shows_a_call_of_the_tool() -> None:
    history = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"]}},
        {"type": "custom_tool_call", "call_id": "c0", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c0", "output": "done"},
        {"type": "of_another_provider", "data": 3},
    ]
    asked = as_request(
        {"model": "m", "input": history, "tools": [{"type": "custom", **PATCH}, {"type": "web_search"}]},
        CreateResponse,
    )
    assert asked.ignored == ["tools.web_search", "input.web_search_call", "input.of_another_provider"]
    plan = asked.plan("resp_1", Times(5, 60), HERE, True, History(), asked.own())
    roles = [message["role"] for message in plan.calls[0].options["messages"]]
    assert roles == ["user", "assistant", "tool"]
    [item] = resource.finished(plan.record, ended(plan.record))["output"]
    assert (item["type"], item["call_id"], item["name"], item["input"]) == (
        "custom_tool_call",
        "c1",
        "apply_patch",
        "a\nb",
    )
    assert items.kept("input", [item])[0]["input"] == "a\nb"


def test_a_tool_that_says_nothing_of_itself_is_refused() -> None:
    said = [{"role": "user", "content": "x"}]
    asked = as_request({"model": "m", "messages": said, "tools": [{"type": "custom"}]}, ChatCompletion)
    with pytest.raises(InvalidRequest) as refused:
        asked.plan("c", 1, HERE, False)
    assert refused.value.field == "tools[0].custom"
