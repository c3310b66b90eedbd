"""Calls of tools in responses: through a real gateway, Redis and worker, turn after turn."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from petiole.tasks.wire.keys import gateway_key
from tests.support.site import Site, eventually

CITY = {"enum": ["Paris", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "web_search"}, {"type": "namespace", "name": "town", "tools": [WEATHER]}]
ASKED: dict[str, Any] = {
    "model": "tooled",
    "input": "How is the weather?",
    "max_output_tokens": 200,
    "temperature": 0,
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "none"},
}

pytestmark = pytest.mark.e2e


@pytest.fixture
def site(tooled_site: Site) -> Site:
    return tooled_site


@pytest.fixture
def client(tooled_client: openai.OpenAI) -> openai.OpenAI:
    return tooled_client


def same(one: Any, other: Any) -> bool:
    """Whether two answers have the same output, but for ids."""
    return [_without_ids(item) for item in one.output] == [_without_ids(item) for item in other.output]


def _without_ids(item: Any) -> dict[str, Any]:
    return {
        name: value for name, value in item.to_dict().items() if name not in ("id", "call_id", "parsed_arguments")
    }


def test_a_call_is_the_same_whole_streamed_and_in_the_background_and_its_answer_continues_it(
    client: openai.OpenAI,
) -> None:
    whole = client.responses.create(**ASKED)
    [call] = whole.output
    assert call.type == "function_call"
    assert (call.name, call.namespace, call.status) == ("weather", "town", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert client.responses.retrieve(whole.id) == whole
    with client.responses.stream(**ASKED) as stream:
        for _ in stream:
            pass
        assert same(stream.get_final_response(), whole)
    begun = client.responses.create(**ASKED, background=True)
    assert same(eventually(lambda: _ended(client, begun.id), "the response has ended"), whole)

    answered: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}]
    more = {**ASKED, "input": answered, "previous_response_id": whole.id, "tool_choice": "none"}
    continued = client.responses.create(**more)
    assert continued.output_text
    listed = client.responses.input_items.list(continued.id, order="asc").data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    assert listed[1].to_dict() == call.to_dict()
    by_hand = client.responses.create(**{**more, "previous_response_id": None, "input": [
        {"role": "user", "content": ASKED["input"]}, call.to_dict(), *answered]})  # fmt: skip
    assert by_hand.output_text == continued.output_text
    assert by_hand.usage is not None
    assert continued.usage is not None
    assert by_hand.usage.input_tokens == continued.usage.input_tokens


def _ended(client: openai.OpenAI, name: str) -> Any:
    found = client.responses.retrieve(name)
    return found if found.status not in ("queued", "in_progress") else None


def test_a_response_that_nobody_read_has_its_call_when_its_log_is_gone(client: openai.OpenAI, site: Site) -> None:
    begun = client.responses.create(**ASKED, background=True)
    meta = f"celery-task-meta-{begun.id}"
    eventually(lambda: b"SUCCESS" in (site.redis.get(meta) or b""), "the result is stored")
    site.redis.delete(gateway_key(f"{begun.id}:output"), *site.redis.scan_iter(f"petiole:{{{begun.id}}}:*"))
    [call] = client.responses.retrieve(begun.id).output
    assert (call.type, call.name) == ("function_call", "weather")  # type: ignore[union-attr]


def test_tools_are_counted(client: openai.OpenAI) -> None:
    told: Any = {name: ASKED[name] for name in ("model", "input", "tools")}
    counted = client.responses.input_tokens.count(**told)
    made = client.responses.create(**told, max_output_tokens=1)
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    without = client.responses.input_tokens.count(**told, tool_choice="none")
    assert without.input_tokens < counted.input_tokens
