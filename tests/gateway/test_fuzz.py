"""Requests that are nearly right, between good ones: each has an answer, none is the gateway's fault, and no text
of them is in a log."""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import httpx2

from tests.support.gateway import Gateway

REQUESTS = int(os.environ.get("FUZZED_REQUESTS", "500"))
SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
if "CI" in os.environ:
    SEED = 1

SECRET = "the-secret-of-a-fuzzed-request"
CHAT: dict[str, Any] = {
    "model": "petiole-tiny",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": SECRET}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "content": SECRET, "tool_call_id": "1"},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "seed": 3,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.5},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": False},
    "priority": 3,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
COMPLETION: dict[str, Any] = {
    "model": "petiole-tiny",
    "prompt": [SECRET, "b"],
    "max_tokens": 3,
    "logprobs": 2,
    "n": 2,
    "min_tokens": 1,
    "stop_token_ids": [7],
    "structured_outputs": {"choice": ["yes", "no"]},
    "repetition_penalty": 1.1,
    "cache_salt": "s",
    "return_token_ids": True,
}
MESSAGE: dict[str, Any] = {
    "model": "petiole-tiny",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": SECRET}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": SECRET}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": SECRET}]},
    ],
    "system": [{"type": "text", "text": SECRET, "cache_control": {"type": "ephemeral"}}],
    "max_tokens": 3,
    "temperature": 0.5,
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 2},
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "integer"}}},
    "metadata": {"user_id": SECRET},
    "stream": True,
}
BASES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {name: MESSAGE[name] for name in ("model", "messages", "system", "tools")},
    "/tokenize": {"model": "petiole-tiny", "messages": CHAT["messages"], "return_token_strs": True},
    "/detokenize": {"model": "petiole-tiny", "tokens": [1, 2, 3]},
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 0.5, 1e308, "", "x", SECRET, "\x00", "😀" * 50,
    [], [[]], [None], {}, {"type": "text"}, {"type": 3}, {"a": {"b": [1, {"c": None}]}}, "9" * 400, [1, "a", None],
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value, with a key of it."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


def fuzzed(base: dict[str, Any], chance: random.Random) -> bytes:
    body = copy.deepcopy(base)
    for name in [name for name in body if name not in ("model", "messages", "prompt", "max_tokens", "tokens")]:
        if chance.random() < 0.6:
            del body[name]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if not (there := places(body)):
            break
        container, key = chance.choice(there)
        match chance.randrange(5):
            case 0 if key != "max_tokens":
                del container[key]
            case 1 if isinstance(container, dict):
                container[chance.choice(["x", "", "type", "role", "😀", "a" * 300])] = copy.deepcopy(
                    chance.choice(VALUES)
                )
            case 2 if isinstance(container, list):
                container.insert(key, copy.deepcopy(chance.choice(VALUES)))
            case _ if key != "max_tokens":
                container[key] = copy.deepcopy(chance.choice(VALUES))
    raw = json.dumps(body).encode()
    if chance.random() < 0.15:
        at = chance.randrange(len(raw))
        raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + chance.choice([0, 1, 5]) :]
    return raw


def test_fuzzed_requests_have_answers_and_leave_the_gateway_whole(gateway: Gateway) -> None:
    print(f"FUZZ_SEED={SEED}")
    chance = random.Random(SEED)
    statuses = set()
    with httpx2.Client(base_url=gateway.root, timeout=60) as http:
        for number in range(REQUESTS):
            path = chance.choice(list(BASES))
            body = fuzzed(BASES[path], chance)
            answer = http.post(path, content=body)
            assert answer.status_code < 500, (answer.text, body)
            statuses.add(answer.status_code)
            if answer.status_code >= 400:
                more = set() if path.startswith("/v1/messages") else {"param", "code"}
                assert answer.json()["error"].keys() == {"message", "type", *more}
            if number % 50 == 0:
                good = {"model": "petiole-tiny", "prompt": "Count from 1 to 5.", "temperature": 0}
                whole = http.post("/v1/completions", json=good).json()
                assert "1, 2, 3" in whole["choices"][0]["text"]
    assert statuses >= {200, 400}
    assert SECRET not in gateway.output
