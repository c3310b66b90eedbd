"""A plugin for openai-python's own tests: they name objects and models that only OpenAI has.

    pytest -p openai_seeds ...     with TEST_API_BASE_URL of a gateway

Each name in a request is replaced by that of an object that is made for it, each model by petiole-tiny. `LEFT_OUT`
says which parameters are not sent, `NOT_SERVED` which tests are skipped, and why."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

BASE = os.environ["TEST_API_BASE_URL"]
MODEL = "petiole-tiny"
MODELS = re.compile(r"\bgpt-[\w.-]+|\btext-embedding[\w.-]+")
SEEDING = "x-seeding"
"""A header of the requests that make objects."""
BRIEF: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "temperature": 0}

LEFT_OUT = {
    "audio": "sound is not served",
    "web_search_options": "searches are not served",
    "functions": "deprecated, and refused: tools are served",
    "function_call": "as functions",
    "suffix": "refused: a model that continues cannot fill in",
    "best_of": "refused: each choice is a task, and n asks for them",
    "echo": "the first token has no log-probability: null at OpenAI, too, but not in the SDK's type",
    "prompt": "a prompt stored at OpenAI",
    "context_management": "refused: /responses/compact is served",
    "previous_response_id": "the tests give it beside a conversation, and OpenAI refuses both, too",
    "logit_bias": "the tests' key is no token id",
    "stream_options": "the tests give it without a stream",
}
"""By a parameter that the tests give with all others: why it is not sent."""

NOT_SERVED = {
    "chat/completions/test_messages": "messages of an answer are not listed",
    r"test_completions.*Completions.*test_\w+_(update|list)": "answers are got by id, and are not changed",
    r"test_models.*_delete": "a model is of its workers",
    r"\[aiohttp\]": "the same with another HTTP client",
    r"test_files.*_content": "a mock, or deprecated",
}
"""By a pattern of tests: why they are skipped."""


def _response(client: openai.OpenAI) -> str:
    return client.responses.create(model=MODEL, input="x", background=True, max_output_tokens=2).id


def _conversation(client: openai.OpenAI) -> str:
    return client.conversations.create(items=[{"role": "user", "content": "x"}]).id


def _file(client: openai.OpenAI) -> str:
    body = {**BRIEF, "messages": [{"role": "user", "content": "x"}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return client.files.create(file=("x.jsonl", io.BytesIO(json.dumps(line).encode())), purpose="batch").id


def _batch(client: openai.OpenAI) -> str:
    return client.batches.create(
        input_file_id=_file(client), endpoint="/v1/chat/completions", completion_window="24h"
    ).id


MAKE: dict[str, Callable[[openai.OpenAI], str]] = {
    "completion_id": lambda client: (
        client.chat.completions.create(**BRIEF, messages=[{"role": "user", "content": "x"}]).id
    ),
    "resp_677efb5139a88190b512bc3fef8e535d": _response,
    "resp_123": _response,
    "response_id": _response,
    "conv_123": _conversation,
    "input_file_id": _file,
    "file_id": _file,
    "batch_id": _batch,
}
NAMES = re.compile("|".join(MAKE))
NO_PLACE = re.compile(r"\b(?:after=after|limit=0)&?")
"""Of a query: an object that no list has, and a page without entries, which OpenAI refuses, too."""


def _made(name: str) -> str:
    with openai.OpenAI(base_url=BASE, api_key="none", default_headers={SEEDING: "yes"}) as client:
        return MAKE[name](client)


def _first_item(conversation: str) -> str:
    with openai.OpenAI(base_url=BASE, api_key="none", default_headers={SEEDING: "yes"}) as client:
        return str(client.conversations.items.list(conversation).data[0].id)


def _seeded(request: httpx2.Request) -> httpx2.Request:
    """The request with objects that exist."""
    path = NAMES.sub(lambda found: _made(found[0]), MODELS.sub(MODEL, request.url.raw_path.decode()))
    if (item := re.search(r"(conv_\w+)/items/msg_abc", path)) is not None:
        path = path.replace("msg_abc", _first_item(item[1]))
    path = NO_PLACE.sub("", path)
    content = request.read()
    if request.headers.get("content-type") == "application/json" and content:
        body = _sensible(json.loads(content), path.partition("?")[0])
        content = MODELS.sub(MODEL, json.dumps(body)).encode()
    headers = {name: value for name, value in request.headers.items() if name != "content-length"}
    url = request.url.copy_with(raw_path=path.encode())
    return httpx2.Request(request.method, url, headers=headers, content=content, extensions=request.extensions)


def _sensible(body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        return body
    left_out = LEFT_OUT.keys() - ({"prompt"} if path.endswith("/completions") else set())
    body = {name: value for name, value in body.items() if name not in left_out}
    if path.endswith(("/responses", "/completions", "/compact", "/input_tokens")):
        body["model"] = MODEL
    if path.endswith(("/responses", "/compact", "/input_tokens")):
        body = {"input": "x"} | body | {"conversation": None}
    if path.endswith("/compact"):  # of the user's messages, which it keeps, the SDK's type says nothing
        body["input"] = [{"role": "assistant", "content": "x"}]
    if path.endswith("/responses"):
        body["max_output_tokens"] = 2
    if "input_file_id" in body:
        body["input_file_id"] = _made("input_file_id")
    for limit in {"max_tokens", "max_completion_tokens"} & body.keys():
        body[limit] = 2
    if path.endswith("/completions"):
        body.setdefault("max_tokens", 2)
        body["seed"] = 1
    return body


_send, _asend = httpx2.Client.send, httpx2.AsyncClient.send


def _asked(request: httpx2.Request) -> httpx2.Request:
    theirs = str(request.url).startswith(BASE) and SEEDING not in request.headers
    return _seeded(request) if theirs else request


def send(client: httpx2.Client, request: httpx2.Request, **more: Any) -> httpx2.Response:
    return _send(client, _asked(request), **more)


async def asend(client: httpx2.AsyncClient, request: httpx2.Request, **more: Any) -> httpx2.Response:
    return await _asend(client, _asked(request), **more)


CLIENTS: Any = httpx2.Client, httpx2.AsyncClient
for kind, ours in zip(CLIENTS, (send, asend), strict=True):
    kind.send = ours


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, why in NOT_SERVED.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=why))
