"""Tools and reasoning through Celery, with a real worker on a model that writes what a constraint allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from petiole.contract.results.task_result import GenerationResult, StreamDelta
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet import models
from petiole.tasks.streams.presentation import StreamPresentation
from tests.support.site import Site, eventually
from tests.support.tooled import tooled
from tests.support.trials import rest

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
ASKED = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tools")
    engine = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_MODEL": tooled(folder),
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_DTYPE": "float32",
    }
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, **engine) as site:
        site.worker()
        yield site


def chat(site: Site, **options: Any) -> Any:
    given = {"messages": ASKED, "max_tokens": 200, "temperature": 0, **options}
    return site.app.send_task("tasks.chat", kwargs=given)


def streamed(site: Site, result: Any) -> dict[str, Any]:
    """What a reader of the stream makes of it."""
    prepared = StreamDelta.model_validate_json(site.state(result)["prepared"])
    showing, found = StreamPresentation(result.id), {"content": "", "reasoning": "", "tool_calls": []}
    showing.show(prepared)
    for entry in site.log(result):
        delta = showing.show(StreamDelta.model_validate(entry))
        found["content"] += delta.content or ""
        found["reasoning"] += delta.reasoning or ""
        for call in delta.tool_calls or ():
            if call.name is not None:
                found["tool_calls"].append(call.model_dump() | {"arguments": ""})
            found["tool_calls"][call.index]["arguments"] += call.arguments
    return found


def same(site: Site, result: Any) -> GenerationResult:
    """The result, which says what the stream says."""
    value = site.get(result)
    read = GenerationResult.model_validate(value)
    assert streamed(site, result) == {
        "content": read.text if read.content is None else read.content,
        "reasoning": read.reasoning.text if read.reasoning else "",
        "tool_calls": value.get("tool_calls", []),
    }
    return read


def test_a_result_has_the_parts_of_its_text_and_so_has_the_stream(site: Site) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nI look.\n{call}\n{call}"
    result = chat(site, tools=[WEATHER, NOW], choice=[text])
    read = same(site, result)
    assert (read.text, read.content) == (text, "I look.")
    assert read.reasoning is not None
    assert read.reasoning.text == "hm"
    assert [(one.index, one.name, json.loads(one.arguments)) for one in read.tool_calls or ()] == [
        (index, "weather", {"city": "Rome", "days": 2}) for index in (0, 1)
    ]
    assert len({one.id for one in read.tool_calls or ()}) == 2
    assert 0 < (read.usage.reasoning_tokens or 0) < read.usage.completion_tokens


def test_without_tools_calls_are_text(site: Site) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for more in ({}, {"tools": [NOW], "tool_choice": "none"}):
        read = same(site, chat(site, choice=[text], **more))
        assert (read.text, read.content, read.tool_calls) == (text, None, None)


def test_the_facts_of_the_model_name_its_format(site: Site) -> None:
    [known] = eventually(lambda: models.models(site.redis), "the worker has said what it serves")
    assert (known.tools, known.reasoning, known.tool_format) == (True, True, "hermes")
    assert "chat_template" not in known.model_dump()


# ---------------------------------------------------------------- enforced


def called(site: Site, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    read = same(site, chat(site, **{"tools": [WEATHER, NOW], **options}))
    assert read.finish_reason == "stop"
    return [(str(one.name), json.loads(one.arguments)) for one in read.tool_calls or ()]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_tool_that_is_named_is_called_once_by_its_schema(site: Site) -> None:
    [(name, given)] = called(site, tool_choice=named("weather"))
    assert name == "weather"
    assert given["city"] in ("Paris", "Rome")
    assert given["days"] in (1, 2)
    assert called(site, tool_choice=named("now"), messages=[*ASKED, ASKED[0]]) == [("now", {})]


@pytest.mark.parametrize("seed", rest(range(3)))
def test_required_allowed_and_parallel(site: Site, seed: int) -> None:
    drawn = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("now")]}}
    once = called(site, tool_choice="required", parallel_tool_calls=False, **drawn)
    assert len(once) == 1
    assert called(site, tool_choice=only, parallel_tool_calls=False, **drawn) == [("now", {})]


def test_a_thought_that_the_prompt_has_ended_or_the_model_may_have(site: Site) -> None:
    once = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    read = same(site, chat(site, reasoning_effort="none", **once))
    assert read.text.startswith("<tool_call>")
    assert (read.content, read.reasoning, read.usage.reasoning_tokens) == ("", None, None)


def test_a_thought_is_closed_when_its_budget_is_used_up_and_the_answer_follows(site: Site) -> None:
    thinking = {"reasoning_effort": "low", "max_reasoning_tokens": 6}
    read = same(site, chat(site, choice=["yes", "no"], **thinking))
    assert read.content in ("yes", "no")
    assert read.reasoning is not None
    closing = len("</think>")  # a token each
    assert (read.usage.reasoning_tokens or 0) <= 6 + closing
    free = same(site, chat(site, ignore_eos=True, max_tokens=40, **thinking))
    assert free.usage.completion_tokens == 40
    assert 0 < (free.usage.reasoning_tokens or 0) <= 6 + closing


def test_what_cannot_be_chosen_is_refused_by_name(site: Site) -> None:
    for options, field in (
        ({"tools": [NOW], "tool_choice": named("rain")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            site.get(chat(site, **options))
        assert refused.value.field == field
    strict = {"type": "function", "function": {"name": "f", "parameters": {"type": 7}, "strict": True}}
    with pytest.raises(InvalidRequest) as refused:
        site.get(chat(site, tools=[strict], tool_choice="required"))
    assert refused.value.field.startswith("tools.f.parameters")


def test_a_worker_dies_in_the_middle_of_a_thought_and_its_budget_goes_on(site: Site) -> None:
    asked = {"reasoning_effort": "low", "max_reasoning_tokens": 90, "ignore_eos": True, "max_tokens": 160}
    asked |= {"temperature": 1.0, "seed": 7, "logit_bias": {"27": -100}}  # "<", so that it does not end by itself
    whole = same(site, chat(site, **asked))
    assert 90 <= (whole.usage.reasoning_tokens or 0) < 110
    result = chat(site, **asked)
    site.streaming(result, at_least=30)
    site.holder().kill()
    site.worker()
    read = same(site, result)
    assert (read.attempt, site.tokens(result)) == (2, whole.token_ids)
    assert read.usage.reasoning_tokens == whole.usage.reasoning_tokens


def test_a_worker_dies_in_the_middle_of_the_arguments_and_the_call_is_what_it_would_have_been(site: Site) -> None:
    note = {"type": "string", "minLength": 150, "maxLength": 200}
    parameters = {
        "type": "object",
        "properties": {"text": note},
        "required": ["text"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    asked = {"tools": [tool], "tool_choice": named("note"), "max_tokens": 400, "temperature": 1.0, "seed": 5}
    whole = same(site, chat(site, **asked))
    [call] = whole.tool_calls or ()
    assert len(json.loads(call.arguments)["text"]) >= 150
    result = chat(site, **asked)
    site.streaming(result, at_least=30)
    site.holder().kill()
    site.worker()
    read = same(site, result)
    assert read.attempt == 2
    assert site.tokens(result) == whole.token_ids
    assert [one.arguments for one in read.tool_calls or ()] == [call.arguments]
