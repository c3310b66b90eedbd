"""Bodies that are nearly right, between good ones: each has an answer, none is the gateway's fault, none holds up
the others, the gateway stays as large as it is, and no text of them is in a log.

`PETIOLE_FUZZ_SEED` repeats a run, `PETIOLE_FUZZ_BODIES` sets the number."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.support.bodies import Bodies
from tests.support.gateway import Gateway
from tests.support.site import Site

BODIES = int(os.environ.get("PETIOLE_FUZZ_BODIES", "300"))
SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(1, 2**31))
if "CI" in os.environ:
    SEED = 1
TRIAL = BODIES >= 5000
GROWTH = 100 * 2**20
"""The most bytes that the gateway may grow by."""
STALL_S = 0.5
"""The most processor time that the loop may take for what it does before it answers another request."""
CLIENTS = 4

SECRET = "the-secret-of-a-fuzzed-request"
MODEL = "petiole-tiny"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CHAT: dict[str, Any] = {
    "model": MODEL,
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
    "tools": [{"type": "function", "function": FUNCTION}],
}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
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
    "model": MODEL,
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
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SECRET}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": SECRET},
]
ASKED: dict[str, Any] = {"model": MODEL, "input": ITEMS, "instructions": "Be brief.", "tools": []}
RESPONSE: dict[str, Any] = {
    **ASKED,
    "max_output_tokens": 3,
    "tools": [{"type": "function", "strict": True, **FUNCTION}],
    "tool_choice": "auto",
    "stream": True,
    "store": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
}
TOKENS: dict[str, Any] = {"model": MODEL, "messages": CHAT["messages"], "return_token_strs": True}
RERANK: dict[str, Any] = {"model": MODEL, "query": "a", "documents": [SECRET, "b"], "top_n": 1}
SCORE: dict[str, Any] = {"model": MODEL, "text_1": "a", "text_2": [SECRET, "b"]}
CLASSIFY: dict[str, Any] = {"model": MODEL, "input": [SECRET, "b"]}
DETOKENIZE: dict[str, Any] = {"model": MODEL, "tokens": [1, 2, 3]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {name: MESSAGE[name] for name in ("model", "messages", "system", "tools")},
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": ASKED,
    "/v1/responses/compact": ASKED,
    "/v1/conversations": {"items": ITEMS, "metadata": {"a": "b"}},
    "/v1/conversations/{id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{id}/items": {"items": ITEMS},
    "/v1/embeddings": {"model": MODEL, "input": [SECRET, "b"], "encoding_format": "float", "dimensions": 8},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), TOKENS),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), DETOKENIZE),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RERANK),
    **dict.fromkeys(("/score", "/v1/score"), SCORE),
    **dict.fromkeys(("/classify", "/v1/classify"), CLASSIFY),
}


class Watched:
    """A gateway that another process asks for its health all the time. In the process of the test,
    whoever asks would wait while a body of 100 MB is written."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._spawned = gateway, multiprocessing.get_context("spawn")
        self._longest = self._spawned.Array("d", 2)
        self._memory = Path(f"/proc/{gateway.process.pid}/status")

    @property
    def longest_s(self) -> tuple[float, float]:
        """The most processor time that its loop took before an answer, and the longest time on the clock."""
        return self._longest[0], self._longest[1]

    def bytes(self) -> int:
        lines = self._memory.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    @contextmanager
    def asked(self) -> Iterator[None]:
        begun, over = self._spawned.Event(), self._spawned.Event()
        given = self._gateway.root, self._gateway.process.pid, self._longest, begun, over
        asking = self._spawned.Process(target=_ask_for_health, args=given)
        asking.start()
        try:
            begun.wait(60)
            yield
        finally:
            over.set()
            asking.join()
        assert asking.exitcode == 0


def _ask_for_health(root: str, pid: int, longest_s: Any, begun: Any, over: Any) -> None:
    loop = Path(f"/proc/{pid}/task/{pid}/stat")

    def took_s() -> float:
        user, system = loop.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    with httpx2.Client(base_url=root, timeout=60) as http:
        http.get("/health")
        begun.set()
        while not over.wait(0.02):
            before, began = took_s(), time.monotonic()
            http.get("/health")
            longest_s[:] = max(longest_s[0], took_s() - before), max(longest_s[1], time.monotonic() - began)


def test_fuzzed_requests_have_answers_and_leave_the_gateway_whole(site: Site, gateway: Gateway) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_BODIES={BODIES}")
    bodies, watched, sizes = Bodies(SEED, EXAMPLES), Watched(gateway), list[int]()
    answers = Counter[str]()
    with httpx2.Client(base_url=gateway.root, timeout=120) as http, ThreadPoolExecutor(CLIENTS) as pool:
        talk = http.post("/v1/conversations", json={}).json()["id"]

        def ask(given: tuple[str, bytes]) -> None:
            path, body = given
            answer = http.post(path.replace("{id}", talk), content=body)
            answers[f"{path} {answer.status_code}"] += 1
            if answer.status_code >= 500:
                print(SEED, path, answer.text, body[:5000], *(worker.output[-5000:] for worker in site.workers))
            assert answer.status_code < 500
            if answer.status_code >= 400:
                told = answer.json()["error"].keys()
                if path.startswith("/v1/messages"):  # what it says of `thread` has details
                    assert told in ({"message", "type"}, {"message", "type", "details"})
                else:
                    assert told == {"message", "type", "param", "code"}

        with watched.asked():
            for first in range(0, BODIES, 100):
                [*pool.map(ask, [bodies.next() for _ in range(min(100, BODIES - first))])]
                good = {"model": MODEL, "prompt": "Count from 1 to 5.", "temperature": 0}
                whole = http.post("/v1/completions", json=good).json()
                assert "1, 2, 3" in whole["choices"][0]["text"]
                sizes.append(watched.bytes())
                if TRIAL:
                    told = f"{[size >> 20 for size in (sizes[0], sizes[-1])]} MiB, {watched.longest_s}"
                    print(f"{first + 100}: {told}", flush=True)
    assert {path.split()[1] for path in answers} >= {"200", "400"}
    assert SECRET not in gateway.output
    print(f"{BODIES} bodies: {dict(answers)}, a loop of {watched.longest_s} s, {max(sizes) - sizes[0] >> 20} MiB")
    assert max(sizes) - sizes[0] < GROWTH, [size >> 20 for size in sizes]
    if TRIAL:
        assert watched.longest_s[0] < STALL_S
