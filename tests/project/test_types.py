"""What a type checker knows of Petiole in an application's code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from petiole.contract.requests import generation
from petiole.contract.requests.submission import SUBMISSION

ROOT = Path(__file__).resolve().parents[2]

APPLICATION = """
import asyncio
from contextlib import aclosing
from typing import Any, assert_type

from celery import chain
from pydantic import BaseModel

from petiole.tasks import GenerateOptions, GenerationDict, StreamDelta, astream, cancel, chat, generate, stream
from petiole import caption, detect, point, put_image, query

class Answer(BaseModel):
    number: int

messages = [{"role": "user", "content": "Who are you?"}]
usual: GenerateOptions = {"prompt": [1, 2], "top_p": 0.9, "logit_bias": {3: -1}, "json_schema": {"type": "object"}}
parsed: dict[str, Any] = {}

result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64, temperature=0, stop="6", seed=None)
assert_type(result.id, str)
assert_type(result.get(timeout=60), GenerationDict)
assert_type(result.get(propagate=False), GenerationDict | Exception)
assert_type(generate.AsyncResult("id").get()["usage"]["completion_tokens"], int)
generate.delay(**usual)
generate.delay(**parsed)
chat.apply_async(kwargs={"messages": messages, "tools": None}, priority=3, queue="gpu").get()["text"].upper()
chain(generate.s(prompt="Count."), generate.s(), chat.s(max_tokens=3), chat.si(messages=messages)).delay()

with generate.stream(timeout_s=30, priority=3, **usual) as deltas:
    assert_type(next(deltas), StreamDelta)
    assert_type(deltas.result.get(), GenerationDict)
    cancel(deltas.result)
for delta in stream(result):
    assert_type(delta.text, str)

async def read() -> None:
    async with aclosing(astream(await asyncio.to_thread(chat.delay, messages=messages))) as deltas:
        async for delta in deltas:
            assert_type(delta, StreamDelta)
    async for delta in chat.astream(messages=messages, timeout_s=30, queue="gpu"):
        assert_type(delta, StreamDelta)
    submitted = await generate.adelay(prompt="Count.", json_schema=Answer, countdown=1.5, require_worker=True)
    assert_type(await submitted.aget(timeout=60), GenerationDict)

photo = put_image(b"photo")
assert_type(query.delay(image=photo, question="What?", temperature=0).get().get("answer"), str | None)
assert_type(detect.delay(image=b"photo", object="car").get()["objects"][0]["x_min"], float)
chain(caption.s(image=photo, length="short"), query.s(image=photo, reasoning=True)).delay()
with point.stream(image=photo, object="car", max_objects=3) as found:
    assert_type([one for delta in found for one in delta.points], list[dict[str, float]])

generate.delay(max_tokens=64)  # call-arg: "prompt"
query.delay(image=photo)  # call-arg: "question"
detect.delay(image=3, object="car")  # arg-type: "bytes | str"
caption.delay(image=photo, length="huge")  # arg-type: "length"
generate.delay(prompt="x", max_token=64)  # call-arg: "max_tokens"
generate.delay(prompt="x", max_tokens="64")  # arg-type: "int | Literal['rest']"
generate.delay(prompt=1)  # arg-type: "str | list[int]"
generate.delay(prompt="x", tools=[])  # call-arg: "tools"
chat.delay(messages="x")  # arg-type: "list[dict[str, Any]]"
chat.delay(messages=messages, prompt="x")  # call-arg: "prompt"
generate.stream(prompt="x", timeout=30)  # call-arg: "timeout_s"
generate.stream(prompt="x", stop=[1])  # list-item: "str"
chat.astream(messages=messages, seed=0.5)  # arg-type: "int | None"
generate.s(max_token=64)  # call-arg: "max_tokens"
generate.si(max_tokens=64)  # call-arg: "prompt"
generate.apply_async(kwargs={"prompt": "x", "max_tokens": "64"})  # typeddict-item: "int | Literal['rest']"
result.get()["txt"]  # typeddict-item: "txt"
result.get()["usage"]["tokens"]  # typeddict-item: "tokens"
"""


def test_type_checkers_read_every_package_that_is_checked_here() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    assert [name for name in checked if not (ROOT / name / "py.typed").exists()] == []


def test_right_uses_pass_a_type_checker_and_wrong_ones_do_not(tmp_path: Path) -> None:
    """A wrong line names its error in a comment: its code, and what the message quotes."""
    pytest.importorskip("mypy")
    (tmp_path / "application.py").write_text(APPLICATION)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--ignore-missing-imports", "application.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"MYPYPATH": str(ROOT)},
    )
    found = re.findall(r"^application\.py:(\d+): error: (.*) \[(.*)\]$", done.stdout, re.M)
    expected = [
        (number, *comment.groups())
        for number, line in enumerate(APPLICATION.splitlines(), 1)
        if (comment := re.search(r"  # ([a-z-]+): (.*)$", line))
    ]
    assert [(int(number), code) for number, _, code in found] == [(n, c) for n, c, _ in expected], done.stdout
    assert all(quoted in message for (_, message, _), (*_, quoted) in zip(found, expected, strict=True)), found


def test_the_options_of_a_submission_are_those_of_no_request() -> None:
    own = generation.GenerateRequest.model_fields.keys() | generation.ChatRequest.model_fields.keys()
    assert not SUBMISSION & own
