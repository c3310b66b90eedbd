"""The request of a message as options of a task."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gateway.anthropic import blocks
from petiole.gateway.anthropic.request import CreateMessage
from petiole.gateway.core.failures import Failure
from petiole.gateway.serving.request_body import as_request
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}, "cache_control": {}}

OFFERED = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
THINKS = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
NUMBER = {"type": "integer"}
FIRST = "messages[0].content[0]"


def options(**more: Any) -> dict[str, Any]:
    plan = as_request({**ASKED, **more}, CreateMessage).plan("msg_1", 1, ModelRoute("q", None))
    return dict(plan.calls[0].options)


def test_a_dialogue_with_tools_images_and_thoughts() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    said_21 = {"type": "text", "text": "21"}
    said = options(
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Zürich"}},
                    {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "20"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "content": [said_21, picture],
                    },
                    {"type": "text", "text": "And"},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "now?"}},
                ],
            },
        ],
    )["messages"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    assert said == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("c1", '{"city": "Zürich"}'), call("c2", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "20"},
        {"role": "tool", "tool_call_id": "c2", "content": [said_21, image]},
        {"role": "user", "content": "And\nnow?"},
    ]


def test_a_dialogue_that_another_server_began_is_told_without_that_servers_tools() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    named = {"type": "tool_reference", "tool_name": "weather"}
    hit = {
        "type": "search_result",
        "title": "Oslo",
        "source": "a.example",
        "content": [{"type": "text", "text": "5"}],
    }
    page = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "6"}]}}
    summary = {"type": "compaction", "content": "So far: 4."}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [named, hit, page]}
    asked = as_request(
        ASKED
        | {
            "messages": [
                {"role": "assistant", "content": [summary, {"type": "fallback"}]},
                {"role": "user", "content": [{"type": "text", "text": "Where?"}, {"type": "container_upload"}]},
                {"role": "assistant", "content": [search, found, {"type": "text", "text": "There."}, call]},
                {"role": "user", "content": [result]},
            ]
        },
        CreateMessage,
    )
    said = asked.conversation({})["messages"]
    assert [one["content"] for one in said] == ["So far: 4.", "Where?", "There.", "Oslo (a.example)\n5\n6"]
    kinds = ["fallback", "container_upload", "server_tool_use", "web_search_tool_result", "tool_reference"]
    assert asked.ignored == [f"messages.{kind}" for kind in kinds]


def test_a_message_of_the_assistant_at_the_end_is_continued() -> None:
    assert "continue_final_message" not in options()
    messages = [*ASKED["messages"], {"role": "assistant", "content": "1, 2,"}]
    assert options(messages=messages)["continue_final_message"] is True


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"max_reasoning_tokens": 5, **THINKS}),
        ({"thinking": {"type": "adaptive"}}, THINKS),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "between_tools"}}, {"reasoning_effort": "none"}),
        ({"tools": [TOOL]}, {"tools": [OFFERED]}),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {}),
        ({"stop_sequences": ["x"], "top_k": 3, "cache_salt": "s"}, {"stop": ["x"], "top_k": 3, "salt": "s"}),
        ({"output_config": {"format": {"type": "json_schema", "schema": NUMBER}}}, {"json_schema": NUMBER}),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto"}, {}),
    ],
)  # fmt: skip
def test_parameters_become_options(given: dict[str, Any], found: dict[str, Any]) -> None:
    plain = {"messages": ASKED["messages"], "max_tokens": 9, "cancel_on_disconnect": True}
    assert options(**given) == {**plain, **found}


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": NAMED}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
    ],
)  # fmt: skip
def test_choices_of_tools(choice: dict[str, Any], found: dict[str, Any]) -> None:
    said = options(tools=[TOOL], tool_choice=choice)
    assert {name: said[name] for name in said if "tool" in name and name != "tools"} == found
    assert "tools" not in options(tools=[TOOL], tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_token": 1}, "max_token"),
        ({"container": "c"}, "container"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as refused:
        as_request({**ASKED, **given}, CreateMessage)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}, f"{FIRST}.tool_use_id"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": []}]}, f"{FIRST}.tool_use_id"),
        ({"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}, FIRST),
        ({"role": "user", "content": [{"type": "audio"}]}, FIRST),
        ({"role": "user", "content": [{"type": "tool_results", "tool_use_id": "c"}]}, FIRST),
        ({"role": "user", "content": [{"type": "toolresult", "tool_use_id": "c"}]}, FIRST),
        ({"role": "assistant", "content": [{"type": "tool_uses", "id": "c", "name": "f", "input": {}}]}, FIRST),
        ({"role": "user", "content": [{"type": "search_result", "title": "x"}]}, FIRST),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}, FIRST),
        ({"role": "assistant", "content": [{"type": "image"}]}, FIRST),
        ({"role": "system", "content": [{"type": "image"}]}, "messages[0].content"),
    ],
)  # fmt: skip
def test_a_wrong_block_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        options(messages=[message])
    assert refused.value.field == field


def test_images_to_fetch_are_found_wherever_they_are() -> None:
    def picture(url: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "url", "url": url}}

    result = {"type": "tool_result", "tool_use_id": "c", "content": [picture("http://b")]}
    page = {"type": "document", "source": {"type": "content", "content": [picture("http://c")]}}
    asked = [{"role": "user", "content": [picture("http://a"), result, page]}, {"content": "x"}]
    assert blocks.to_fetch(asked) == [
        ("messages[0].content[0].source.url", "http://a"),
        ("messages[0].content[1].content[0].source.url", "http://b"),
        ("messages[0].content[2].source.content[0].source.url", "http://c"),
    ]
