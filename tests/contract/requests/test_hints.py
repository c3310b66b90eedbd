"""Habits from other APIs, and slips: the error says what to write here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kombu import serialization
from kombu.utils import json as kombu_json
from pydantic import BaseModel

from petiole.contract.requests.generation import ChatRequest, GenerateRequest
from petiole.contract.requests.submission import SUBMISSION
from petiole.contract.requests.validation import _ELSEWHERE, instead_of
from petiole.tasks import InvalidRequest, chat, generate
from petiole.tasks.submission.options import parse

MESSAGES = [{"role": "user", "content": "hello"}]


def refused(task: Any, *given: Any, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        parse(task.name, given, options)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("max_completion_tokens", 5, "use max_tokens"),
        ("max_new_tokens", 5, "use max_tokens"),
        ("include_stop_str_in_output", True, "use include_stop"),
        ("response_format", {"type": "json_object"}, "use json_schema, which takes a schema or a pydantic class"),
        ("model", "gpt-4o", "it belongs to the submission: an argument of delay, stream or apply_async"),
        ("n", 3, "submit a group, each with a seed of its own"),
        ("stream", True, "every task has a stream: generate.stream(...), or stream(result)"),
        ("max_token", 5, "did you mean max_tokens?"),
        ("temprature", 0.5, "did you mean temperature?"),
        ("priority", 3, "it belongs to the submission: an argument of delay, stream or apply_async"),
        ("messages", MESSAGES, "it is one of chat"),
        ("image", "abc", "it is one of query, caption, point and detect"),
    ],
)
def test_an_option_of_somebody_elses(option: str, value: Any, said: str) -> None:
    message = refused(generate, prompt="hello", **{option: value})
    assert message.startswith(f"{option}: is not an option of this task (")
    assert said in message
    assert message.endswith(f", got {value!r}")


def test_an_option_that_resembles_nothing_has_no_hint() -> None:
    assert refused(generate, prompt="hello", zzz=1) == "zzz: is not an option of this task, got 1"


def test_a_conversation_has_a_name() -> None:
    assert refused(chat, MESSAGES).startswith("messages: must be named: chat.delay(messages=[...]), got ")
    assert refused(generate, MESSAGES).startswith("messages: must be named: chat.delay(messages=[...]), got ")


@pytest.mark.parametrize("kind", [GenerateRequest, ChatRequest])
def test_no_hint_is_about_an_option_that_exists(kind: type[BaseModel]) -> None:
    assert not kind.model_fields.keys() & (_ELSEWHERE.keys() | SUBMISSION)
    assert all(instead_of(name, kind.model_fields) for name in [*_ELSEWHERE, *SUBMISSION])


class Answer(BaseModel):
    number: int


def test_a_schema_with_the_keys_of_kombus_encoding_survives_the_message() -> None:
    """kombu decodes an object of just these keys as a value that it has encoded."""
    named = {"__type__": {"type": "string"}, "__value__": {"type": "integer"}}
    schema = {"type": "array", "items": [{"type": "object", "properties": named}]}
    for submitted in (generate.s(prompt="x", json_schema=schema), generate.si(prompt="x", json_schema=schema)):
        _, encoding, body = serialization.dumps(dict(submitted), "json")
        once = serialization.loads(body, "application/json", encoding)
        twice = kombu_json.loads(kombu_json.dumps(once))  # as a link that a worker sends on
        assert parse(generate.name, (), twice["kwargs"]).json_schema == schema


def test_a_pydantic_class_is_its_schema() -> None:
    schema = Answer.model_json_schema()
    assert json.loads(json.dumps(generate.s(prompt="x", json_schema=Answer)))["kwargs"]["json_schema"] == schema
    assert dict(chat.si(messages=MESSAGES, json_schema=Answer))["kwargs"]["json_schema"] == schema
