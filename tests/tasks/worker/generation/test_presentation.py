"""What the worker makes of a conversation's options: which output is constrained, and how."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gpu_worker.request import Request
from petiole.tasks.requests.schemas import ChatRequest, validate
from petiole.tasks.templates.formats import FAMILIES
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
