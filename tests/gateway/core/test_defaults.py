"""What a gateway gives requests that do not say it."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gateway.anthropic.request import CreateMessage
from petiole.gateway.core import requests
from petiole.gateway.http import server
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.completions import TextCompletion
from petiole.gateway.serving.request_body import as_request
from petiole.tasks.errors import InvalidSettings
from petiole.tasks.settings import settings

SAID = [{"role": "user", "content": "x"}]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(text: str) -> None:
        known = settings().model_copy(update={"gateway_defaults": text})
        monkeypatch.setattr(requests, "settings", lambda: known)

    return give


def chat(**asked: Any) -> ChatCompletion:
    return as_request({"model": "m", "messages": SAID, **asked}, ChatCompletion)


def test_a_request_has_what_it_does_not_say(given: Any) -> None:
    given('{"*": {"temperature": 0.6, "top_k": 20, "return_tokens_as_token_ids": true}}')
    assert chat().sampling(0) == {"temperature": 0.6, "top_k": 20}
    assert chat(temperature=None).temperature == 0.6, "null says nothing"
    assert chat(temperature=0.0, top_k=-1).sampling(0) == {"temperature": 0.0, "top_k": 0}
    assert as_request({"model": "m", "prompt": "x"}, TextCompletion).return_tokens_as_token_ids
    told = as_request({"model": "m", "max_tokens": 1, "messages": SAID}, CreateMessage)
    assert (told.temperature, told.top_k, told.ignored) == (0.6, 20, [])


def test_all_of_vllm_is_all_for_every_interface(given: Any) -> None:
    given('{"*": {"top_k": -1, "repetition_penalty": 1.1, "return_tokens_as_token_ids": true}}')
    server.check_defaults()
    told = as_request({"model": "m", "max_tokens": 1, "messages": SAID}, CreateMessage)
    assert told.sampling() == {"top_k": 0}
    assert chat().sampling() == {"top_k": 0, "repetition_penalty": 1.1}


def test_of_several_patterns_that_fit_the_last_counts(given: Any) -> None:
    given('{"*": {"temperature": 0.5, "top_p": 0.5}, "qwen*": {"temperature": 0.7}}')
    assert chat(model="qwen3").sampling(0) == {"temperature": 0.7, "top_p": 0.5}
    assert chat(model="other").sampling(0) == {"temperature": 0.5, "top_p": 0.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON of parameters by models"),
        ('{"*": 1}', "must be JSON of parameters by models"),
        ('{"*": {"temprature": 1}}', "temprature: must be one of frequency_penalty, "),
        ('{"*": {"temperature": "hot"}}', "temperature: must be a number, got 'hot'"),
        ('{"*": {"top_k": -2}}', "top_k: must be at least 0, got -2"),
        ('{"*": {"temperature": 101}}', r"temperature: must be at most 100.*, got 101"),
    ],
)
def test_what_no_request_may_have_is_refused_when_the_gateway_starts(given: Any, text: str, said: str) -> None:
    given(text)
    with pytest.raises(InvalidSettings, match=f"PETIOLE_GATEWAY_DEFAULTS: .*{said}"):
        server.check_defaults()
