"""What the worker makes of a conversation's options: which output is constrained, and how."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.contract.requests.generation import ChatRequest
from petiole.contract.requests.validation import validate
from petiole.gpu_worker.request import FinishReason, Request, Result, Timing, Usage
from petiole.gpu_worker.request.skills import SkillCall
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.output_parsing.formats import FAMILIES
from petiole.tasks.worker.generation.presentation import Presentation

SAID: list[dict[str, Any]] = [{"role": "user", "content": "a"}]


def of(name: str) -> Presentation:
    return Presentation(FAMILIES[name], FAMILIES[name])


@pytest.mark.parametrize(
    ("given", "own"), [("minimal", "low"), ("none", "low"), ("max", "high"), ("medium", "medium")]
)
def test_harmony_knows_three_efforts(given: str, own: str) -> None:
    request = Request(messages=SAID, chat_template_kwargs={"reasoning_effort": given, "a": 1})
    assert of("harmony").with_marks(request).chat_template_kwargs == {"reasoning_effort": own, "a": 1}
    assert of("hermes").with_marks(request).chat_template_kwargs == request.chat_template_kwargs


def test_the_answer_of_a_skill_is_what_follows_its_thought() -> None:
    request, said = Request(skill=SkillCall("caption")), "hm\n</think>\n\nA cat."
    timing = Timing(0.0, 0.0, 0.0, 0.0, 0.0)
    result = Result(
        "a", said, (1, 2), FinishReason.STOP, "eos", Usage(1, 0, 2), timing, "m", answer={"caption": said}
    )
    found = of("hermes").parts("a", request, result, "<|im_start|>assistant\n<think>\n", lambda: range(1, 99))
    assert found["caption"] == "A cat."
    assert found["reasoning"].text == "hm"
    assert "content" not in found


def constraint(name: str, **options: Any) -> Any:
    return of(name).constraint(validate(ChatRequest, {"messages": SAID, **options}))


def test_a_budget_is_a_constraint_where_the_family_thinks() -> None:
    kind, value = constraint("hermes", max_reasoning_tokens=5)
    assert (kind, value["budget"], value["free"], value["calls"]) == ("calls", 5, True, [])
    kind, value = constraint("hermes", max_reasoning_tokens=5, regex="a+")
    assert (value["budget"], value["free"], value["answer"]) == (5, False, {"kind": "regex", "value": "a+"})
    tool = {"type": "function", "function": {"name": "f"}}
    kind, value = constraint("hermes", max_reasoning_tokens=5, tools=[tool], tool_choice="required")
    assert (value["budget"], value["free"], value["least"]) == (5, False, 1)
    assert constraint("llama", max_reasoning_tokens=5) is None
    assert constraint("llama", max_reasoning_tokens=5, regex="a+") == ("regex", "a+")
    assert "budget" not in constraint("hermes", regex="a+")[1]


def asked(name: str, tool: dict[str, Any], **options: Any) -> Any:
    return constraint(name, tools=[{"type": "function", "function": tool}], **options)


def parameters(key: str) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": "integer"}}}


OPENAIS = ["a", "9-lives", "-", "_" * 64, "Get-weather_2"]


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"think"}))
def test_every_format_carries_the_names_that_openai_admits(name: str) -> None:
    for one in OPENAIS:
        asked(name, {"name": one, "parameters": parameters("File Path")})
        asked(name, {"name": one, "parameters": parameters("größe")})


@pytest.mark.parametrize(
    ("name", "tool", "message"),
    [
        ("glm4", {"name": "a b"}, r"tools\[0\]\.function\.name: must not have ' ': .*glm4, got 'a b'"),
        ("llama", {"name": 'a"b'}, "function.name: must not have '\"'"),
        ("gemma4", {"name": "a{b"}, r"function.name: must not have '\{'"),
        ("hermes", {"name": "a" * 257}, "must have 1 to 256 characters"),
        ("glm-xml", {"name": " a"}, "no space at its ends"),
        ("qwen-xml", {"name": "a", "parameters": parameters("a>b")}, "parameters.properties: must not have '>'"),
        ("glm-xml", {"name": "a", "parameters": parameters("<")}, "parameters.properties: must not have '<'"),
        ("gemma3", {"name": "a", "parameters": parameters("a=b")}, "parameters.properties: must not have '='"),
        ("gemma4", {"name": "a", "parameters": {"properties": {"v": parameters("a:b")}}}, "must not have ':'"),
    ],
)
def test_a_name_that_the_format_cannot_carry_is_refused(name: str, tool: dict[str, Any], message: str) -> None:
    for strict in (False, True):
        with pytest.raises(InvalidRequest, match=message):
            asked(name, {**tool, "strict": strict})
    asked(name, tool, tool_choice="none")
    asked("hermes", {**tool, "name": "a"})


QWEN_25 = "<|im_start|>{{ messages }}<tool_call>{{ tools }}"


@pytest.mark.parametrize(
    ("described", "thinks"),
    [
        ({"chat_template": QWEN_25}, False),
        ({"chat_template": QWEN_25 + "{{ content.split('</think>') }}"}, True),
        ({"chat_template": QWEN_25, "reasoning": True}, True),
        ({"chat_template": "{{ tools }}[TOOL_CALLS][ARGS]"}, False),
        ({"chat_template": "{{ tools }}[TOOL_CALLS][ARGS][THINK]"}, True),
    ],
)
def test_an_enforced_call_has_a_thought_only_where_the_template_knows_one(
    described: dict[str, Any], thinks: bool
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    given = {"messages": SAID, "tools": [tool], "tool_choice": "required"}
    own = Presentation.of(described)
    kind, value = own.constraint(validate(ChatRequest, given)) or ("", {})
    assert (kind, value["thought"] is not None) == ("calls", thinks)
    asked_for = own.constraint(validate(ChatRequest, given | {"max_reasoning_tokens": 5})) or ("", {})
    assert asked_for[1]["thought"] is not None, "a budget asks for it"


def test_tools_are_refused_if_the_model_would_never_see_them() -> None:
    own, given = Presentation.of({"tools": False}), {"messages": SAID, "tools": [{"name": "f"}]}
    with pytest.raises(InvalidRequest, match="tools: must not be given: the model's chat template"):
        own.constraint(validate(ChatRequest, given))
    assert own.constraint(validate(ChatRequest, given | {"tool_choice": "none"})) is None
    assert own.constraint(validate(ChatRequest, {"messages": SAID})) is None


def test_a_strict_tool_forbids_calls_without_marks() -> None:
    assert asked("hermes", {"name": "f", "strict": True})[1]["whole"]
    assert not asked("hermes", {"name": "f"}, parallel_tool_calls=False)[1]["whole"]
    assert not asked("llama", {"name": "f"}, parallel_tool_calls=False)[1]["whole"]


def test_a_model_that_sees_calls_and_thinks_as_its_template_says() -> None:
    described = {"chat_template": QWEN_25 + "{{ content.split('</think>') }}"}
    assert Presentation.of(described | {"images": True}) == Presentation.of(described) != Presentation()
    assert Presentation.of({"images": True, "chat": True}) == Presentation(), "it answers by a skill"
