"""Items as they are kept, and as messages of a task."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gateway.core.failures import Failure
from petiole.gateway.openai.responses import compaction, items
from petiole.gateway.openai.responses.listing import listed
from petiole.gateway.openai.responses.request import Before, CreateResponse, Times
from petiole.gateway.serving.bodies import as_request
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import Found

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
    ]
    once = items.kept("input", given)
    assert items.kept("input", once) == once


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


def test_a_call_may_stand_in_an_earlier_turn() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "d"}
    assert messages([output], before=[call])[-1]["content"] == "d"
    with pytest.raises(InvalidRequest, match=r"input\[1\]\.call_id: must be that of a function_call before it"):
        messages([{"role": "user", "content": "x"}, output])


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
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"id": 7}], "input[0].id"),
    ],
)
def test_what_is_no_item_is_refused_by_name(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        items.kept("input", given)
    assert refused.value.field == field


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
    assert listed([], {})["first_id"] is None
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"limit": "٣"}, {"order": "up"}, {"after": "none"}):
        with pytest.raises(Failure):
            listed(all_of_it, wrong)


def plan(**given: Any) -> Any:
    asked = as_request({"model": "m", "input": "x", **given}, CreateResponse)
    found = Found("q", None)
    return asked.plan("resp_1", Times(5, 86_400), found, True, Before(), asked.own())


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
    assert plan(tools=[{"type": "web_search"}, {"type": "function", "name": "f"}], tool_choice="none").calls


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"conversation": 7}, "conversation"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}, "tools[1]"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7200}}, "expires_after"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 1}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as refused:
        plan(**given)
    assert (refused.value.status, refused.value.param) == (400, param)


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
