"""What clients of other servers send: honoured, ignored and named, or refused with a hint."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gateway.anthropic.request import CreateMessage
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.foreign import unknown
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.completions import TextCompletion
from petiole.gateway.openai.responses.request import CreateResponse
from petiole.gateway.serving.request_body import as_request
from petiole.tasks.settings import settings

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def chat(**given: Any) -> ChatCompletion:
    return as_request({**ASKED, **given}, ChatCompletion)


def test_what_promises_nothing_is_ignored_and_named() -> None:
    asked = chat(num_ctx=4096, keep_alive="5m", provider={}, usage={"include": True}, chat_id="c", models=["a"])
    assert asked.ignored == ["num_ctx", "keep_alive", "provider", "usage", "chat_id", "models"]
    assert as_request({**ASKED, "max_tokens": 1, "num_ctx": 1}, CreateMessage).ignored == ["num_ctx"]
    assert chat(user="u").ignored == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("guided_x", "'guided' in its name"),
        ("max_retries", "'max_' in its name"),
        ("format", "use response_format"),
        ("num_predict", "use max_tokens"),
        ("x" * 65, "more than 64 characters"),
    ],
)
def test_what_promises_something_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(Failure) as refused:
        chat(**{name: 1})
    assert (refused.value.code, refused.value.param) == ("unknown_parameter", name)
    assert hint in refused.value.message


def test_many_are_refused() -> None:
    with pytest.raises(Failure):
        chat(**{f"k{k}": k for k in range(unknown.MOST_UNKNOWN + 1)})


def test_all_are_refused_where_a_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown, "settings", lambda: settings().model_copy(update={"gateway_unknown": "refuse"}))
    with pytest.raises(Failure) as refused:
        chat(num_ctx=1)
    assert refused.value.code == "unknown_parameter"


def test_the_header_is_ascii_and_short() -> None:
    told = unknown.told(["ключ\r\n", *(f"k{k}" for k in range(30))])
    assert told.isascii()
    assert "\n" not in told
    assert told.count(",") == unknown.MOST - 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"guided_json": '{"type": "object"}'}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"guided_choice": ["a"]}, {"structured_outputs": {"choice": ["a"]}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": True, "max_tokens": 5}},
         {"thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"enable_thinking": False}, {"reasoning_effort": "none"}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"thinking_budget": 7}, {"thinking_token_budget": 7}),
    ],
)  # fmt: skip
def test_what_has_an_equal_here_is_honoured(given: dict[str, Any], found: dict[str, Any]) -> None:
    asked = chat(**given)
    assert asked.model_dump(exclude_unset=True, exclude=set(ASKED)) == found
    assert asked.ignored == []


def test_responses_and_completions_honour_the_same() -> None:
    asked = as_request({"model": "m", "input": "x", "enable_thinking": False, "regex": "a"}, CreateResponse)
    assert (asked.reasoning, asked.structured_outputs) == ({"effort": "none"}, {"regex": "a"})
    asked = as_request({"model": "m", "prompt": "x", "guided_regex": "a"}, TextCompletion)
    assert asked.structured_outputs == {"regex": "a"}


def test_one_constraint_under_two_names_is_refused() -> None:
    with pytest.raises(Failure) as refused:
        chat(guided_regex="a", structured_outputs={"regex": "b"})
    assert refused.value.param == "guided_regex"
