"""A line of OpenAI's batches gets the body that the same request gets over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2

from tests.support.gateway import Gateway
from tests.support.nursery import petiole
from tests.support.site import Site

CHAT, TEXT, RESPONSE, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "Count from 1 to 5."}]
SURE: dict[str, Any] = {"model": "petiole-tiny", "temperature": 0, "max_tokens": 12}
SAID: dict[str, Any] = {"model": "petiole-tiny", "temperature": 0, "max_output_tokens": 12}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**SURE, "messages": MESSAGES}),
    (CHAT, {**SURE, "messages": MESSAGES, "n": 2, "temperature": 1, "seed": 5}),
    (CHAT, {**SURE, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    (TEXT, {**SURE, "prompt": ["Count from 1 to 5.", "Hello"], "echo": True}),
    (TEXT, {**SURE, "prompt": "Hello", "logprobs": 1}),
    (CHAT, {**SURE, "messages": []}),
    (CHAT, {**SURE, "messages": MESSAGES, "max_tokens": 0}),
    (CHAT, {**SURE, "messages": MESSAGES, "mistake": 1}),
    (CHAT, {**SURE, "messages": MESSAGES, "model": "nobody"}),
    (TEXT, {**SURE, "prompt": "word " * 3000}),
    (RESPONSE, {**SAID, "instructions": "Count.", "input": "Count from 1 to 5."}),
    (RESPONSE, {**SAID, "input": [{"role": "user", "content": "Hello"}], "top_logprobs": 2}),
    (RESPONSE, {**SAID, "input": "Hello", "store": False, "metadata": {"night": "1"}}),
    (RESPONSE, {**SAID, "input": "word " * 3000}),
    (RESPONSE, {**SAID, "input": []}),
    (RESPONSE, {**SAID, "input": "Hello", "n": 2}),
    (VECTORS, {"model": "petiole-tiny", "input": ["Hello", "Count from 1 to 5."]}),
    (VECTORS, {"model": "petiole-tiny", "input": "Hello", "encoding_format": "base64"}),
    (VECTORS, {"model": "petiole-tiny", "input": []}),
]
NOT_THE_SAME = ("id", "created", "created_at", "completed_at", "system_fingerprint", "store")
KEPT: list[dict[str, Any]] = [
    {"background": True},
    {"store": True},
    {"previous_response_id": "resp_1"},
    {"conversation": "conv_1"},
    {"stream": True},
]


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Without what no two answers have in common."""
    body = {name: value for name, value in body.items() if name not in NOT_THE_SAME}
    if body.get("usage"):
        body["usage"] = {name: count for name, count in body["usage"].items() if isinstance(count, int)}
    if "output" in body:
        body["output"] = [{**item, "id": ""} for item in body["output"]]
    return body


def test_bodies_are_those_of_http(site: Site, gateway: Gateway, tmp_path: Path) -> None:
    rows = [{"custom_id": f"c{k}", "method": "POST", "url": u, "body": b} for k, (u, b) in enumerate(ASKED)]
    bad: list[Any] = [
        {**rows[0], "url": "/v1/other"},
        {**rows[0], "method": "GET"},
        {**rows[0], "custom_id": 3},
        {**rows[0], "body": "text"},
        {**rows[0], "body": {**SURE, "messages": MESSAGES, "stream": True}},
        {**rows[0], "more": 1},
        [],
        *({**rows[0], "url": RESPONSE, "body": {**SAID, "input": "Hello", **given}} for given in KEPT),
        {**rows[0], "url": RESPONSE, "body": {**SAID, "input": [{"type": "item_reference", "id": "msg_1"}]}},
        {**rows[0], "url": VECTORS, "body": {"model": "petiole-tiny", "input": [1, 2]}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    ran = petiole("batch", "in.jsonl", "-o", "out.jsonl", folder=tmp_path, **site.environment)
    assert ran.returncode == 1, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == len(rows) + len(bad)
    with httpx2.Client(base_url=gateway.root, timeout=60) as http:
        for row, line in zip(rows, lines, strict=False):
            answer = http.post(row["url"], json=row["body"])
            assert (line["custom_id"], line["error"]) == (row["custom_id"], None)
            assert line["response"].get("ignored") == ("mistake" if "mistake" in row["body"] else None)
            assert line["response"]["status_code"] == answer.status_code
            assert comparable(line["response"]["body"]) == comparable(answer.json())
    for line in lines[len(rows) :]:
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["message"]
