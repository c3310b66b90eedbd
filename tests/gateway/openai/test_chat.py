"""chat/completions with openai-python, through a real gateway, Redis and worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.support.gateway import Gateway
from tests.support.site import Site

COUNT = [{"role": "user", "content": "Count from 1 to 5."}]
ASKED: dict[str, Any] = {"model": "petiole-tiny", "messages": COUNT, "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.url, timeout=60) as http:
        yield http


def events(answer: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """(id, chunk) of each event of a stream, which must end as OpenAI's do."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    blocks = [*filter(None, re.sub("^:.*\n", "", answer.text, flags=re.MULTILINE).split("\n\n"))]
    assert blocks.pop() == "data: [DONE]"
    for block in blocks:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((lines.get("id", ""), json.loads(lines["data"])))
    return found


def content(found: list[tuple[str, dict[str, Any]]], index: int = 0) -> str:
    choices = [choice for _, chunk in found for choice in chunk.get("choices", ()) if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_whole_answer_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED)
    assert whole.id.startswith("chatcmpl-")
    assert (whole.model, whole.object) == ("petiole-tiny", "chat.completion")
    [choice] = whole.choices
    assert (choice.message.content, choice.finish_reason) == ("1, 2, 3, 4, 5", "stop")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (16, 10)
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert not any(chunk.usage for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    later = client.chat.completions.retrieve(whole.id)
    assert later == whole


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "temperature": 1, "seed": 3}]
)
def test_a_stream_is_resumed_after_every_one_of_its_numbers(http: httpx2.Client, more: dict[str, Any]) -> None:
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}, **more}
    with http.stream("POST", "/chat/completions", json=body) as answer:
        answer.read()
        first = events(answer)
    path = f"/chat/completions/{first[0][1]['id']}"
    for place, (cursor, _) in enumerate(first):
        given = {"starting_after": cursor} if place % 2 else {}
        headers = {} if place % 2 else {"last-event-id": cursor}
        rest = events(http.get(path, params={"stream": "true", **given}, headers=headers))
        for index in range(more.get("n", 1)):
            assert content(first[: place + 1], index) + content(rest, index) == content(first, index)
        assert [bool(chunk.get("usage")) for _, chunk in rest[-1:]] == [True] * (place + 1 < len(first))
    if "logprobs" in more:
        for number in range(int(first[-1][0])):
            rest = events(http.get(path, params={"stream": "true", "starting_after": number}))
            assert content(first).endswith(content(rest))
            assert spelled(first).endswith(spelled(rest))
            assert int(rest[0][0]) > number
    assert events(http.get(path, params={"stream": "true"})) == first or "n" in more


def spelled(found: list[tuple[str, dict[str, Any]]]) -> str:
    shown = [choice["logprobs"] for _, chunk in found for choice in chunk["choices"] if choice["logprobs"]]
    return "".join(token["token"] for one in shown for token in one["content"])


def test_log_probabilities_have_texts_and_bytes(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3)
    assert whole.choices[0].logprobs is not None
    tokens = whole.choices[0].logprobs.content or []
    assert whole.usage is not None
    assert len(tokens) == whole.usage.completion_tokens
    assert all(bytes(token.bytes or ()).decode(errors="replace") == token.token for token in tokens)
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token for token in tokens)
    chunks = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in (choice.logprobs.content if choice.logprobs else None) or ()
    ]
    assert streamed == tokens
    alone = client.chat.completions.create(**ASKED, logprobs=True).choices[0].logprobs
    assert alone is not None
    assert [(token.token, token.top_logprobs) for token in alone.content or ()] == [
        (one.token, []) for one in tokens
    ]
    ids = client.chat.completions.create(**ASKED, extra_body={"return_token_ids": True})
    assert len(ids.choices[0].model_extra["token_ids"]) == len(tokens)  # type: ignore[index]
    assert ids.choices[0].logprobs is None
    assert ids.usage is not None
    prompt = ids.model_extra["prompt_token_ids"]  # type: ignore[index]
    assert len(prompt) == ids.usage.prompt_tokens
    [first, *_] = client.chat.completions.create(**ASKED, stream=True, extra_body={"return_token_ids": True})
    assert first.model_extra == {"prompt_token_ids": prompt}


def test_words_are_banned_and_tokens_named(client: openai.OpenAI) -> None:
    named = {
        **ASKED,
        "logprobs": True,
        "extra_body": {"bad_words": ["3", "nor this"], "logprob_token_ids": [15, 16]},
    }
    whole = client.chat.completions.create(**named).choices[0]
    assert whole.logprobs is not None
    tokens = whole.logprobs.content or []
    assert "3" not in [token.token for token in tokens]
    assert (whole.message.content or "").startswith("1, 2, ")
    for token in tokens:  # as vLLM: the token itself, too
        own = [] if token.token in ("0", "1") else [token.token]
        assert [one.token for one in token.top_logprobs] == [*own, "0", "1"]
    assert tokens[0].logprob == tokens[0].top_logprobs[1].logprob, "it is a 1"
    chunks = client.chat.completions.create(**named, stream=True)
    shown = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for one in shown if one for token in one.content or ()] == tokens
    asked = {**ASKED, "prompt": "1, 2, ", "logprobs": 0, "extra_body": {"logprob_token_ids": [15, 16]}}
    del asked["messages"]
    found = client.completions.create(**asked).choices[0].logprobs
    assert found is not None
    assert all({"0", "1"} <= top.keys() for top in found.top_logprobs or ())


def test_formats_stops_and_choices(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for given in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"extra_body": {"structured_outputs": {"json": schema}}},
    ):
        text = client.chat.completions.create(**{**ASKED, "max_tokens": 100}, **given).choices[0].message.content
        assert isinstance(json.loads(text or ""), dict), given
    loose = client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
    assert (loose.choices[0].message.content or "").startswith("{")
    chosen = client.chat.completions.create(**ASKED, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].message.content in ("yes", "no")
    stopped = client.chat.completions.create(**ASKED, stop=[", 4"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("1, 2, 3", "stop")
    assert stopped.choices[0].model_extra == {"stop_reason": ", 4", "token_ids": None}
    cut = client.chat.completions.create(**{**ASKED, "max_tokens": 3})
    assert cut.choices[0].finish_reason == "length"
    several = client.chat.completions.create(**{**ASKED, "temperature": 1.5}, n=3, seed=7)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    again = client.chat.completions.create(**{**ASKED, "temperature": 1.5}, n=3, seed=7)
    assert [choice.message for choice in again.choices] == [choice.message for choice in several.choices]


def test_conversations_as_clients_write_them(client: openai.OpenAI) -> None:
    told: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Count from 1 to 5."}]},
    ]
    same: list[Any] = [{"role": "system", "content": "Be brief."}, *COUNT]
    asked = {**ASKED, "seed": 1}
    one, other = (client.chat.completions.create(**{**asked, "messages": given}) for given in (told, same))
    assert one.choices[0].message == other.choices[0].message
    assert one.usage is not None
    assert other.usage is not None
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    for echo, shown in ((False, ", 3, 4, 5"), (True, "1, 2, 3, 4, 5")):
        asked = {
            **ASKED,
            "messages": [*COUNT, {"role": "assistant", "content": "1, 2"}],
            "extra_body": {"continue_final_message": True, "add_generation_prompt": False, "echo": echo},
        }
        assert client.chat.completions.create(**asked).choices[0].message.content == shown
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == shown


def test_absent_max_tokens_means_the_rest_of_the_context(client: openai.OpenAI) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    whole = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 256
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"model": "gpt-9"}, "model", "model_not_found"),
        ({"messages": []}, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_type"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprob_token_ids": [2]}, "logprob_token_ids", "invalid_value"),
        ({"bad_words": ["a", ""]}, "bad_words[1]", "invalid_value"),
        ({"include_reasoning": False, "return_token_ids": True}, "include_reasoning", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
            "response_format.json_schema.schema.type",
            "invalid_value",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}
                ]
            },
            "messages[0].content[0].image_url.url",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_refused_before_its_stream_begins(
    http: httpx2.Client, more: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    body = {**ASKED, **({"stream": True} if stream and "stream_options" not in more else {}), **more}
    answer = http.post("/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404 if "model" in more else 400, param, code)
    assert error.keys() == {"message", "type", "param", "code"}
    found = error["message"].removeprefix("This model's maximum context length is 2048 tokens. ")
    assert found.startswith(f"{param}: ")
    assert (found != error["message"]) == (code == "context_length_exceeded")


def test_bodies_that_are_no_requests(http: httpx2.Client, gateway: Gateway) -> None:
    for body in (b"", b"{", b"[]", b'{"model": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"nan"):
        answer = http.post("/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body[:20]
    for lone in ("model", "messages"):
        body = (
            {**ASKED, "model": "\ud800"}
            if lone == "model"
            else {**ASKED, "messages": [{"role": "user", "content": "\ud800"}]}
        )
        answer = http.post("/chat/completions", content=json.dumps(body))
        assert answer.status_code in (400, 404), answer.text
    too_large = b'{"model":"' + b"x" * (65 * 2**20) + b'"}'
    assert http.post("/chat/completions", content=too_large).status_code == 413
    assert http.get("/chat/completions/chatcmpl-none").json()["error"]["code"] == "not_found"
    assert http.get("/nothing").status_code == 404
    assert http.get("/chat/completions").status_code == 405
    assert http.get("/chat/completions/x", params={"stream": "maybe"}).status_code == 404


def test_models_are_listed_with_what_they_take(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("petiole-tiny", "model")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] > 0
    assert client.models.retrieve("petiole-tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/none")


def test_a_deleted_request_is_forgotten(client: openai.OpenAI, site: Site) -> None:
    whole = client.chat.completions.create(**ASKED)
    assert client.chat.completions.delete(whole.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(whole.id)
    assert not site.redis.exists(f"petiole:gateway:{whole.id}")


def test_no_prompt_is_in_a_log(http: httpx2.Client, gateway: Gateway, site: Site) -> None:
    answer = http.post(
        "/chat/completions", json={**ASKED, "messages": [{"role": "user", "content": "tell nobody"}]}
    )
    name = answer.json()["id"]
    assert http.get(f"/chat/completions/{name}").json() == answer.json()
    assert "POST /v1/chat/completions 200" in gateway.output
    assert "GET /v1/chat/completions/{id} 200" in gateway.output
    figures = httpx2.get(f"{gateway.root}/metrics").text
    for text in ("tell nobody", "Count from", name):
        assert text not in gateway.output + figures
    assert 'petiole_gateway_requests_total{method="POST",path="/v1/chat/completions",status="200"}' in figures
