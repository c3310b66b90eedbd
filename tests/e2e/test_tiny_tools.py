"""The small model that has learnt to call tools: it calls them unforced, and answers from their results."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from petiole.contract.results.task_result import GenerationResult
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.text import load_tokenizer
from petiole.tasks.fleet import models
from tests.e2e.test_tools import same
from tests.support.gateway import Gateway
from tests.support.site import PATIENCE_S, REPOSITORY, Site, eventually

PAGE = (REPOSITORY / "docs" / "tools.md").read_text()


def tool(name: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": [*parameters], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


NUMBER = {"type": "integer"}
TOOLS = [tool("weather", city={"type": "string", "maxLength": 40}), tool("multiply", a=NUMBER, b=NUMBER)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    engine = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_MODEL": "petiole-tiny-tools",
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_DTYPE": "float32",
    }
    folder = tmp_path_factory.mktemp("tools")
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, **engine) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("serve"), PETIOLE_BROKER_URL=site.url) as gateway:
        yield gateway


def chat(site: Site, messages: list[Any], **options: Any) -> GenerationResult:
    given = {"messages": messages, "tools": TOOLS, "max_tokens": "rest", "temperature": 0, **options}
    return same(site, site.app.send_task("tasks.chat", kwargs=given))


def called(read: GenerationResult) -> list[tuple[str | None, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in read.tool_calls or ()]


@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaces", "compact"])
def test_two_tools_are_called_without_being_forced_and_their_results_are_in_the_answer(
    site: Site, separators: tuple[str, str] | None
) -> None:
    results = {"weather": {"celsius": -3}, "multiply": {"product": 1904}}
    both = [("weather", {"city": "Rome"}), ("multiply", {"a": 34, "b": 56})]
    for question, calls, answer in (
        ("How warm is it in Rome?", both[:1], "It is -3 degrees in Rome."),
        ("What is 34 times 56?", both[1:], "34 x 56 = 1904"),
    ):
        messages: list[Any] = [{"role": "user", "content": question}]
        read = chat(site, messages)
        assert (called(read), read.content, read.finish_reason) == (calls, "", "stop")
        said = [{"id": one.id, "type": "function", "function": one.model_dump()} for one in read.tool_calls or ()]
        messages.append({"role": "assistant", "content": "", "tool_calls": said})
        for one in read.tool_calls or ():
            content = json.dumps(results[one.name or ""], separators=separators)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": content})
        read = chat(site, messages)
        assert (read.text, read.tool_calls) == (answer, None)
    assert called(chat(site, messages, tool_choice="none")) == []


def test_a_worker_killed_in_the_middle_of_the_arguments(site: Site) -> None:
    """Nothing forces the call, and nothing but the limit ends it: braces that close are not to be drawn."""
    tokenizer = load_tokenizer(resolve_model("petiole-tiny-tools"))
    closing = {str(token): -100 for token in range(tokenizer.vocab_size) if b"}" in tokenizer.token_bytes(token)}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "How warm is it in Rome?"}], "tools": TOOLS}
    asked |= {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "logit_bias": closing}
    whole = same(site, site.app.send_task("tasks.chat", kwargs=asked))
    [call] = whole.tool_calls or ()
    assert (call.name, call.arguments.startswith('{"city": "Rome"')) == ("weather", True)
    result = site.app.send_task("tasks.chat", kwargs=asked)
    eventually(
        lambda: '"arguments": {"' in "".join(delta["text"] for delta in site.log(result)), "they have begun"
    )
    site.holder().kill()
    site.worker()
    read = same(site, result)
    assert (read.attempt, site.tokens(result)) == (2, whole.token_ids)
    assert [one.arguments for one in read.tool_calls or ()] == [call.arguments]


# ---------------------------------------------------------------- docs/tools.md, as it is printed


def block(mark: str) -> str:
    [code] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if mark in block]
    return str(code)


def test_the_agent_loop_runs_as_printed(site: Site) -> None:
    code = block("answer = chat.delay(")
    environment = {**os.environ, "PETIOLE_BROKER_URL": site.url, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ran.stdout == "It is 20 degrees in Rome.\n"


def test_the_loop_over_http_runs_as_printed(site: Site, gateway: Gateway) -> None:
    names: dict[str, Any] = {"openai": openai, "json": json, "parameters": TOOLS[0]["function"]["parameters"]}
    asked: list[str] = []

    def weather(city: str) -> dict[str, int]:
        asked.append(city)
        return {"celsius": 20}

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(
            block("openai.OpenAI(").replace("http://127.0.0.1:8000/v1", gateway.url), {**names, "weather": weather}
        )
    assert printed.getvalue() == "It is 20 degrees in Rome.\n"
    assert asked == ["Rome"]


def test_chat_completions_stream_an_unforced_call(gateway: Gateway) -> None:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        said: Any = [{"role": "user", "content": "What is 12 times 34?"}]
        given: Any = {"model": "petiole-tiny-tools", "messages": said, "tools": TOOLS, "temperature": 0}
        arguments, names, reason = "", [], None
        for chunk in client.chat.completions.create(**given, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                assert piece.function is not None
                arguments += piece.function.arguments or ""
                names += [piece.function.name] if piece.function.name else []
            reason = chunk.choices[0].finish_reason or reason
        assert (json.loads(arguments), names, reason) == ({"a": 12, "b": 34}, ["multiply"], "tool_calls")
