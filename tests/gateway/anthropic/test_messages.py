"""/v1/messages with Anthropic's SDK, through a real gateway, Redis and worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.support.gateway import Gateway

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.skipif(find_spec("anthropic") is None, reason="anthropic is not installed")

COUNT: Any = [{"role": "user", "content": "Count from 1 to 5."}]
ASKED: dict[str, Any] = {
    "model": "petiole-tiny",
    "messages": COUNT,
    "max_tokens": 40,
    "extra_body": {"temperature": 0},
}
CITY = {"enum": ["Paris", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOLED: dict[str, Any] = {
    **ASKED,
    "model": "tooled",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
}


def made(url: str) -> anthropic.Anthropic:
    import anthropic  # for seconds: only the process whose tests use it imports it

    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with made(gateway.url) as client:
        yield client


@pytest.fixture(scope="module")
def tooled(tooled_client: openai.OpenAI) -> Iterator[anthropic.Anthropic]:
    with made(str(tooled_client.base_url).rstrip("/")) as client:
        yield client


def frames(answer: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """(id, event) of each event of a stream, whose name must be its type."""
    found = []
    for block in filter(None, re.sub("^:.*\n", "", answer.text, flags=re.MULTILINE).split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        event = json.loads(lines["data"])
        assert lines["event"] == event["type"]
        found.append((lines["id"], event))
    return found


def text(found: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(event["delta"]["text"] for _, event in found if event["type"] == "content_block_delta")


def test_a_whole_message_and_its_stream_are_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    assert (whole.id[:4], whole.model, whole.stop_reason) == ("msg_", "petiole-tiny", "end_turn")
    [block] = whole.content
    assert block.type == "text"
    assert block.text == "1, 2, 3, 4, 5"
    used = whole.usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == 16
    assert used.output_tokens == 10
    with client.messages.stream(**ASKED) as stream:
        types = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [one for one in types if "delta" not in one and one != "text"] == [
        "message_start", "content_block_start", "content_block_stop", "message_stop",
    ]  # fmt: skip
    assert [getattr(one, "text", None) for one in streamed.content] == [block.text]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, used.output_tokens)
    counted = client.messages.count_tokens(model="petiole-tiny", messages=COUNT)
    assert counted.input_tokens == 16


def test_a_stream_is_resumed_after_every_one_of_its_events(gateway: Gateway) -> None:
    body = {**ASKED, **ASKED["extra_body"], "stream": True}
    del body["extra_body"]
    with httpx2.Client(base_url=gateway.url, timeout=60) as http:
        first = frames(http.post("/messages", json=body))
        path = f"/messages/{first[0][1]['message']['id']}"
        for place, (cursor, _) in enumerate(first):
            headers = {"last-event-id": cursor}
            rest = frames(http.get(path, params={"stream": "true"}, headers=headers))
            assert text(first[: place + 1]) + text(rest) == text(first) == "1, 2, 3, 4, 5"
            assert [event["type"] for _, event in rest][-1:] == ["message_stop"] * (place + 1 < len(first))


def test_a_required_call_whole_and_streamed_and_a_second_round(tooled: anthropic.Anthropic) -> None:
    asked = {**TOOLED, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked["thinking"] = {"type": "disabled"}
    whole = tooled.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    [call] = whole.content
    assert (call.type, getattr(call, "name", "")) == ("tool_use", "weather")
    assert call.type == "tool_use"
    assert call.input["city"] in ("Paris", "Rome")
    with tooled.messages.stream(**asked) as stream:
        again = stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in again.content] == [("tool_use", call.input)]
    answered = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20"}]}
    messages = [*asked["messages"], whole.to_param(), {"role": "user", "content": [answered]}]
    second = tooled.messages.create(**{**TOOLED, "messages": messages, "tool_choice": {"type": "none"}})
    assert second.content
    counted = tooled.messages.count_tokens(model="tooled", messages=messages, tools=TOOLED["tools"])
    without = tooled.messages.count_tokens(model="tooled", messages=messages)
    assert counted.input_tokens > without.input_tokens


def test_a_thought_is_a_block_and_ends_at_its_budget(tooled: anthropic.Anthropic) -> None:
    asked = {**TOOLED, "tools": [], "thinking": {"type": "enabled", "budget_tokens": 6}}
    whole = tooled.messages.create(**asked)
    assert [block.type for block in whole.content][:1] == ["thinking"]
    assert whole.usage.output_tokens_details is not None
    assert 6 <= whole.usage.output_tokens_details.thinking_tokens < 30  # with the marks
    with tooled.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    thoughts = [(block.type, getattr(block, "thinking", None)) for block in whole.content]
    assert [(block.type, getattr(block, "thinking", None)) for block in streamed.content] == thoughts
    said = [*asked["messages"], whole.to_param(), {"role": "user", "content": "Again."}]
    assert tooled.messages.create(**{**asked, "messages": said}).content
    without = tooled.messages.create(**{**asked, "thinking": {"type": "disabled"}})
    assert "thinking" not in [block.type for block in without.content]


def test_stops_beginnings_and_schemas(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(**ASKED, stop_sequences=[", 4"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", 4")
    assert client.messages.create(**{**ASKED, "max_tokens": 3}).stop_reason == "max_tokens"
    begun = client.messages.create(**{**ASKED, "messages": [*COUNT, {"role": "assistant", "content": "1, 2"}]})
    assert [getattr(block, "text", "") for block in begun.content] == [", 3, 4, 5"]
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    [block] = client.messages.create(**ASKED, output_config=form).content
    assert block.type == "text"
    assert json.loads(block.text)["city"] in ("Paris", "Rome")


def test_errors_are_anthropics(client: anthropic.Anthropic, gateway: Gateway) -> None:
    import anthropic

    def refused(**more: Any) -> tuple[int, str, str]:
        with pytest.raises(anthropic.APIStatusError) as error:
            client.messages.create(**{**ASKED, **more})
        body: Any = error.value.body
        assert body["type"] == "error"
        assert error.value.request_id
        return error.value.status_code, body["error"]["type"], body["error"]["message"]

    assert refused(model="none")[:2] == (404, "not_found_error")
    status, kind, message = refused(stop_sequences=[""])
    assert (status, kind, message.partition(":")[0]) == (400, "invalid_request_error", "stop_sequences[0]")
    long = [{"role": "user", "content": "word " * 20_000}]
    assert refused(messages=long)[:2] == (400, "invalid_request_error")
    assert refused(messages=long)[2].startswith("prompt is too long: ")
    with pytest.raises(anthropic.BadRequestError):  # before the stream begins
        client.messages.create(**{**ASKED, "messages": long}, stream=True)
    for path in ("/v1/messages/msg_unknown", "/v1/messages/a/b"):
        answer = httpx2.get(f"{gateway.root}{path}")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx2.post(f"{gateway.root}/v1/messages", content=b"{").json()["type"] == "error"


def test_models_are_listed_for_either_kind_of_client(client: anthropic.Anthropic, gateway: Gateway) -> None:
    import anthropic

    assert [model.id for model in client.models.list()] == ["petiole-tiny"]
    assert client.models.retrieve("petiole-tiny").type == "model"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none")
    assert httpx2.get(f"{gateway.url}/models").json()["object"] == "list"
