"""Items as they are kept, and as messages of a task."""

from __future__ import annotations

import base64
import functools
from typing import Any

import pytest

from petiole.gateway.core.failures import Failure
from petiole.gateway.openai.answers import listed
from petiole.gateway.openai.responses import compaction, items, tools
from petiole.gateway.openai.responses.request import NAMES, CreateResponse, History, Times
from petiole.gateway.serving.answering import checked
from petiole.gateway.serving.request_body import as_request
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

IMAGE = "data:image/png;base64,AAAA"


def messages(given: Any, instructions: str | None = None, before: Any = ()) -> list[dict[str, Any]]:
    return items.messages(instructions, items.kept("before", [*before]), items.kept("input", given))


def test_text_is_an_item_of_the_user_with_an_id() -> None:
    [item] = items.kept("input", "hello")
    assert item["id"].startswith("msg_")
    assert item == {
        "type": "message",
        "id": item["id"],
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hello"}],
    }


def test_kept_items_are_kept_as_they_are() -> None:
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": "b", "phase": "final_answer", "id": "msg_1"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "d"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "e"}]},
        {"type": "compaction", "encrypted_content": compaction.packed("f")},
        {"type": "item_reference", "id": "msg_2"},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "g"}]},
    ]
    once = items.kept("input", given)
    assert items.kept("input", once) == once


def test_of_others_histories_what_cannot_be_read_is_left_out() -> None:
    """Each kept item has the form that OpenAI lists, and what is skipped is in no list."""
    action = {"type": "exec", "command": ["ls", 3], "env": 7}
    given: list[Any] = [
        {"type": "computer_call", "action": {"type": "fly"}, "call_id": 3},
        {"type": "reasoning", "id": "rs_1", "summary": 7, "content": [3, {"text": "a"}], "encrypted_content": 4},
        {"type": "local_shell_call", "id": "lsc_1", "action": action, "status": "odd"},
        {"type": "local_shell_call_output", "id": "lsco_1", "call_id": "c", "output": {"x": 1}},
        {"type": "of_another_provider", "data": 3},
    ]
    done = {"status": "completed"}
    ran = {"type": "exec", "command": ["ls"], "env": {}}
    thought = [{"type": "reasoning_text", "text": "a"}]
    assert items.remembered(items.kept("input", given)) == [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": thought},
        {"type": "local_shell_call", "id": "lsc_1", **done, "call_id": "lsc_1", "action": ran},
        {"type": "local_shell_call_output", "id": "lsco_1", **done, "call_id": "c", "output": ""},
    ]


def test_messages_are_what_a_chat_would_be_asked() -> None:
    given: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "2", "output": "d"},
        {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"x":1}'}},
    ]
    assert messages(given, "You are a pirate.") == [
        {"role": "system", "content": "You are a pirate.\n\nBe brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "d"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
    ]


def test_reasoning_belongs_to_what_the_model_said_next_and_a_call_to_its_namespace() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "f", "namespace": "n", "arguments": "{}"}
    given = [
        thought("a"),
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        thought("d"),
        thought("e"),
        call,
        {"type": "function_call_output", "call_id": "1", "output": "f"},
        thought("lost"),
        {"role": "user", "content": "g"},
        {"role": "assistant", "content": "h"},
    ]
    said = messages(given)
    assert [one.get("reasoning_content") for one in said] == ["a", None, "d\ne", None, None, None]
    assert said[2]["tool_calls"][0]["function"]["name"] == "n__f"


def test_a_call_may_stand_in_an_earlier_turn() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "d"}
    assert messages([output], before=[call])[-1]["content"] == "d"
    with pytest.raises(InvalidRequest, match=r"input\[1\]\.call_id: must be that of a call before it"):
        messages([{"role": "user", "content": "x"}, output])


def packed(text: bytes) -> str:
    return f"petiole-1.{base64.urlsafe_b64encode(text).decode()}"


def nested(depth: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (7, "input"),
        ([7], "input[0]"),
        ([{"type": "message", "content": "x"}], "input[0].role"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}],
            "input[0].content[0].file_id",
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}],
            "input[0].content[0].image_url",
        ),
        ([{"type": "function_call", "call_id": "1", "name": "f"}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "1"}], "input[0].output"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0].encrypted_content"),
        ([{"type": "compaction", "encrypted_content": "petiole-1.é"}], "input[0].encrypted_content"),
        ([{"type": "compaction", "encrypted_content": packed(b"[" * 9999)}], "input[0].encrypted_content"),
        ([{"type": "compaction", "encrypted_content": packed(b'{"summary": 1}')}], "input[0].encrypted_content"),
        ([{"type": "custom_tool_call", "call_id": "1", "name": "f"}], "input[0].input"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"type": nested(9999)}], "input[0].type"),
        ([{"id": 7}], "input[0].id"),
        ([{"type": "additional_tools"}], "input[0].tools"),
        ([{"type": "additional_tools", "tools": [{}] * 1025}], "input[0].tools"),
        ([{"type": "additional_tools", "tools": [7]}], "input[0].tools[0]"),
        ([{"type": "additional_tools", "tools": [{}]}], "input[0].tools[0].type"),
        ([{"type": "additional_tools", "role": "user", "tools": []}], "input[0].role"),
        ([{"type": "additional_tools", "tools": [{"type": "function"}]}], "input[0].tools[0].name"),
        ([{"type": "additional_tools", "tools": [{"type": "namespace", "name": "n"}]}], "input[0].tools[0].tools"),
    ],
)
def test_what_is_no_item_is_refused_by_name(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        items.kept("input", given)
    assert refused.value.field == field


def test_only_images_that_a_model_is_shown_are_fetched() -> None:
    url = "https://example.invalid/x.png"
    parts = [{"type": "input_image", "image_url": url}]
    given = [
        {"type": "mcp_call", "output": parts},
        {"type": "reasoning", "content": parts},
        {"type": ["message"], "content": parts},
        {"role": "user", "content": [{"type": "input_text", "text": "x", "image_url": url}]},
        {"role": "user", "content": parts},
        {"type": "function_call_output", "call_id": "1", "output": parts},
    ]
    assert items.to_fetch("input", given) == [
        ("input[4].content[0].image_url", url),
        ("input[5].output[0].image_url", url),
    ]


def test_an_items_id_leads_back_to_its_response() -> None:
    name = f"resp_{'ab' * 16}"
    assert items.response_of(items.output_id(name, "message", 300)) == name
    assert items.response_of("nothing") == "resp_"


def test_a_summary_survives_its_packing() -> None:
    text = "résumé 😀"
    assert compaction.unpacked("x", compaction.packed(text)) == text
    shown = messages([{"type": "compaction", "encrypted_content": compaction.packed(text)}])
    assert shown == [{"role": "user", "content": f"A summary of the conversation so far:\n{text}"}]


def test_pages_put_together_are_the_list() -> None:
    all_of_it = [{"id": f"i{k}"} for k in range(7)]
    for order in ("asc", "desc"):
        seen: list[Any] = []
        query = {"limit": "3", "order": order}
        while True:
            page = listed(all_of_it, query)
            seen += page["data"]
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
        assert seen == (all_of_it if order == "asc" else all_of_it[::-1])
    assert listed([], {})["first_id"] == ""
    limits = ("0", "x", "٣", "0000000001000", "1" * 5000)
    for wrong in (*({"limit": limit} for limit in limits), {"order": "up"}, {"after": "none"}):
        with pytest.raises(Failure):
            listed(all_of_it, wrong)


F = {"type": "function", "name": "f"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLED: list[Any] = [
    {"type": "web_search"},
    {"type": "function", "name": "f", "description": "It is f.", "parameters": SCHEMA, "strict": True},
    {"type": "namespace", "name": "mcp__map", "description": "Maps.", "tools": [
        {"type": "function", "name": "f", "description": "Another f."}, {"type": "of_others", "name": "g"}]},
]  # fmt: skip


def plan(**given: Any) -> Any:
    asked = as_request({"model": "m", "input": "x", **given}, CreateResponse)
    found = ModelRoute("q", None)
    return asked.plan("resp_1", Times(5, 86_400), found, True, History(), asked.own())


def test_a_request_becomes_a_task() -> None:
    schema = {"type": "object"}
    given = plan(
        max_output_tokens=5,
        top_k=3,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        include=["message.output_text.logprobs"],
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    [call] = given.calls
    assert call.options == {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "top_k": 3,
        "json_schema": schema,
        "logprobs": 0,
        "logprob_texts": True,
    }
    assert given.keep_s == 7200
    assert given.names["json_schema"] == "text.format.schema"
    assert plan().calls[0].options["max_tokens"] == "rest"
    assert plan(text={"format": {"type": "text"}}).calls[0].options.keys() == {"messages", "max_tokens"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"conversation": 7}, "conversation"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "tools": [F]}]}, "tools[0].name"),
        ({"tools": [F, F]}, "tools[1].name"),
        ({"tools": [F | {"parameters": 7}]}, "tools[0].parameters"),
        ({"tools": [F | {"strict": "no"}]}, "tools[0].strict"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "custom"}]}]}, "input[0].tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": CALLED, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7200}}, "expires_after"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": [1] * 10_001}, "input"),
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 1}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as refused:
        checked(lambda: plan(**given), NAMES)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_functions_go_to_the_task_with_their_namespaces_and_other_tools_are_skipped() -> None:
    made = plan(
        tools=CALLED,
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        thinking_token_budget=9,
    )
    [call] = made.calls
    assert {name: value for name, value in call.options.items() if name not in ("messages", "max_tokens")} == {
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "It is f.", "parameters": SCHEMA, "strict": True},
            },
            {"type": "function", "function": {"name": "mcp__map__f", "description": "Maps.\nAnother f."}},
        ],
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "max_reasoning_tokens": 9,
    }  # fmt: skip
    assert made.names["reasoning_effort"] == "reasoning.effort"
    assert tools.names(CALLED) == {"f": (None, "f"), "mcp__map__f": ("mcp__map", "f")}
    assert "tools" not in plan(tools=CALLED, tool_choice="none").calls[0].options
    assert "tools" not in plan(tools=CALLED[:1]).calls[0].options


def test_tools_that_items_name_can_be_called_and_the_last_of_a_name_counts() -> None:
    def named(*tools: dict[str, Any]) -> dict[str, Any]:
        return {"type": "additional_tools", "role": "developer", "tools": [*tools]}

    search = {"type": "file_search", "max_num_results": -1}
    asked = CreateResponse(
        model="m",
        tools=[F],
        tool_choice={"type": "custom", "name": "g"},
        input=[{"role": "user", "content": "x"}, named(F | {"description": "new"}, search)],
    )
    before = items.kept("before", [named({"type": "custom", "name": "g"}, search)])
    assert before[0]["tools"] == [{"type": "custom", "name": "g"}]
    past = History(items=before)
    made = asked.plan("resp_1", Times(5, 86_400), ModelRoute("q", None), True, past, asked.own())
    told = [tool["function"] for tool in made.calls[0].options["tools"]]
    assert [(one["name"], one.get("description")) for one in told] == [("g", None), ("f", "new")]
    assert made.record.asked["custom"] == ["g"]
    assert asked.ignored == ["tools.file_search"]
    later = CreateResponse(model="m", tool_choice="required", input="y")
    made = later.plan("resp_2", Times(5, 86_400), ModelRoute("q", None), True, past, later.own())
    assert made.calls[0].options["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("required", "required"),
        (F, F),
        ({**F, "namespace": "mcp__map"}, {"type": "function", "name": "mcp__map__f"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, F]},
            {"type": "allowed_tools", "mode": "required", "tools": [F]},
        ),
    ],
)  # fmt: skip
def test_a_choice_names_functions_as_the_task_knows_them(given: Any, taken: Any) -> None:
    assert plan(tools=CALLED, tool_choice=given).calls[0].options["tool_choice"] == taken


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ("json", "text.format.type"),
    ],
)
def test_a_format_is_refused_by_name(form: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(text={"format": form})
    assert refused.value.field == field
