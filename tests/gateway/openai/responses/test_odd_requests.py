"""Requests as no client should send them, and clients that do not wait for each other."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.gateway import Gateway

SECRET = "swordfish"
GOOD: dict[str, Any] = {
    "model": "petiole-tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SECRET}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SECRET}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": SECRET},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "x"},
    ],
    "instructions": SECRET,
    "max_output_tokens": 2,
    "temperature": 0.5,
    "metadata": {"a": "b"},
    "store": True,
    "stream": False,
    "background": False,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "tools": [{"type": "web_search"}],
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "reasoning": {"effort": "low"},
    "previous_response_id": None,
    "conversation": None,
    "expires_after": {"anchor": "created_at", "seconds": 7200},
}
ODD = (
    'null', 'true', '0', '-1', '3.5', '1e308', '1e400', str(2**70), '""', '"\\u0000"', '"\\ud800"', '"é😀"',
    '"resp_x"', '"conv_x:turns"', '[]', '{}', '[[]]', '{"a":{}}', '["a",1]', '{"type":"message"}', '{"id":7}',
)  # fmt: skip


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.url, timeout=60) as http:
        yield http


def odd(good: dict[str, Any], chance: random.Random) -> str:
    """The request with something else in one to three places, as JSON."""
    body, marks = copy.deepcopy(good), []
    for _ in range(chance.choice((1, 1, 2, 3))):
        node: Any = body
        while True:
            place = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
            if isinstance(node[place], dict | list) and node[place] and chance.random() < 0.65:
                node = node[place]
                continue
            break
        marks.append(f"odd-{len(marks)}")
        match chance.random():
            case low if low < 0.2 and isinstance(node, dict) and len(node) > 1:
                del node[place]
            case low if low < 0.3 and isinstance(node, dict):
                node[chance.choice(("type", "id", "role", "other"))] = marks[-1]
            case _:
                node[place] = marks[-1]
    text = json.dumps(body)
    for mark in marks:
        text = text.replace(f'"{mark}"', chance.choice(ODD))
    return text


@pytest.mark.parametrize("path", ["/responses", "/responses/input_tokens", "/responses/compact", "/conversations"])
def test_odd_requests_are_refused_and_good_ones_answered(http: httpx2.Client, gateway: Gateway, path: str) -> None:
    chance = random.Random(path)
    fields = {
        "/responses": GOOD.keys(),
        "/conversations": ("metadata", "items"),
    }.get(path, ("model", "input", "instructions", "previous_response_id"))
    good = {name: ({**GOOD, "items": GOOD["input"][:2]})[name] for name in fields}
    for count in range(150 if path == "/responses" else 40):
        sent = odd(good, chance)
        answer = http.post(path, content=sent)
        assert answer.status_code in (200, 400, 404), (sent, answer.text)
        assert answer.status_code == 200 or answer.json()["error"].keys() == {"message", "type", "param", "code"}
        if count % 20 == 0:
            assert http.post(path, json=good).status_code == 200
    assert SECRET not in gateway.output


def test_of_several_requests_in_a_conversation_at_once_each_runs_alone(http: httpx2.Client) -> None:
    talk = http.post("/conversations", json={}).json()["id"]
    body = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2, "conversation": talk}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: http.post("/responses", json=body), range(24)))
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert {*refused} <= {"conversation_locked"}
    made = len(answers) - len(refused)
    assert made
    items = http.get(f"/conversations/{talk}/items", params={"limit": 100}).json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"] * made
    counted = {answer.json()["usage"]["input_tokens"] for answer in answers if answer.status_code == 200}
    assert len(counted) == made  # each was told what those before it had said
