"""A line of OpenAI's batches gets the body that the same request gets over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2

from tests.support.gateway import Gateway
from tests.support.nursery import petiole
from tests.support.site import Site

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Count from 1 to 5."}]
SURE: dict[str, Any] = {"model": "petiole-tiny", "temperature": 0, "max_tokens": 12}
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
]
NOT_THE_SAME = ("id", "created", "system_fingerprint")


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Without what no two answers have in common."""
    body = {name: value for name, value in body.items() if name not in NOT_THE_SAME}
    if "usage" in body:
        body["usage"] = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
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
            assert line["response"]["status_code"] == answer.status_code
            assert comparable(line["response"]["body"]) == comparable(answer.json())
    for line in lines[len(rows) :]:
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["message"]
