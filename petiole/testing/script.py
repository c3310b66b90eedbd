"""What the fake worker answers, and the tasks that it has had."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from petiole.contract.requests.count import CountRequest
from petiole.contract.requests.generation import Common
from petiole.contract.results.outputs import Prepared, Usage
from petiole.contract.results.task_result import FinishReason, Reasoning, ToolCall
from petiole.contract.tasks import TASKS
from petiole.tasks.output_parsing import message
from petiole.tasks.output_parsing.formats import FAMILIES

MODEL = "petiole-fake"
CONTEXT = 8192
_FORMAT = FAMILIES["hermes"]
_TOKEN = re.compile(r"\S+\s*|\s+")


class Answer:
    """A scripted answer: each of `pieces` is one delta of the stream.

    `reasoning`, `calls` (pairs of a tool's name and its arguments) come with a conversation's text as a model
    writes them. `delay_s` passes before each delta. `error` fails the task after the pieces. `more` are fields of
    the result, such as `points=[{"x": 0.5, "y": 0.5}]` or `vectors=[[0.1, 0.2]]`."""

    def __init__(
        self,
        *pieces: str,
        reasoning: str = "",
        calls: Sequence[tuple[str, Mapping[str, Any]]] = (),
        finish_reason: FinishReason = "stop",
        delay_s: float = 0.0,
        error: Exception | None = None,
        **more: Any,
    ) -> None:
        for piece in pieces:
            if not isinstance(piece, str):
                raise TypeError(f"Answer: each piece must be a text, got {piece!r}")
        if finish_reason not in get_args(FinishReason):
            allowed = ", ".join(get_args(FinishReason))
            raise ValueError(f"Answer: finish_reason must be one of {allowed}, got {finish_reason!r}")
        if error is not None and not isinstance(error, Exception):
            raise TypeError(f"Answer: error must be an exception, got {error!r}")
        self.finish_reason, self.delay_s, self.error, self.more = finish_reason, delay_s, error, more
        self.divided = bool(reasoning or calls)
        self.tools: dict[str, dict[str, str]] = {name: {} for name, _ in calls}
        thought = [f"<think>\n{reasoning}\n</think>\n\n"] if reasoning else []
        written = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
        self.pieces = [*thought, *pieces, *(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)]

    def __repr__(self) -> str:
        return f"Answer({', '.join(map(repr, self.pieces))})"


@dataclass(frozen=True)
class Received:
    """A task that the fake has had. `options`: those that were given, with what a chain has appended; `request`:
    with all defaults."""

    name: str
    task_id: str
    options: Mapping[str, Any]
    request: Common


Scripted = str | Answer | Exception | Callable[[Received], Any]
"""A text, an answer, the error that the task fails with, or a function of the task that gives one of these."""


def checked(scripted: Scripted) -> Scripted:
    if isinstance(scripted, str | Answer | Exception) or callable(scripted):
        return scripted
    raise TypeError(f"an answer must be a text, an Answer, an exception or a function, got {scripted!r}")


def answer_of(scripted: Scripted, received: Received) -> Answer:
    while not isinstance(scripted, str | Answer | Exception):
        scripted = checked(scripted(received))
    if isinstance(scripted, Exception):
        return Answer(error=scripted)
    return Answer(*words_of(scripted)) if isinstance(scripted, str) else scripted


def words_of(text: str) -> list[str]:
    found: list[str] = _TOKEN.findall(text)
    return found


def tokens_of(text: str) -> list[int]:
    """One token for each word."""
    return [zlib.crc32(word.encode()) % 32_000 for word in words_of(text)]


@dataclass
class ScriptedOutput:
    """An output. `codec.result` reads its fields."""

    received: Received
    scripted: Answer
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str | None = "eos"
    model: str = MODEL

    @property
    def finish_reason(self) -> str:
        return "length" if self.stop_reason == "max_tokens" else self.scripted.finish_reason

    @property
    def prompt_tokens(self) -> int:
        options = self.received.options
        return len(
            tokens_of(json.dumps([options.get("prompt"), options.get("messages"), options.get("question")]))
        )

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, 0, len(self.token_ids))

    @property
    def prepared(self) -> Prepared:
        if not self.scripted.divided:
            return Prepared(MODEL, MODEL, self.prompt_tokens, "")
        return Prepared(MODEL, MODEL, self.prompt_tokens, "", self.scripted.tools, format=_FORMAT.name)

    def shown(self) -> dict[str, Any]:
        """The fields of the result that follow from its text."""
        task, field = self.received.task_id, TASKS[self.received.name].answers
        if not self.scripted.divided:
            return {field: self.text} if field in _IN_WORDS else {}
        read = message.read(_FORMAT, self.text, tools=self.scripted.tools)
        calls = [
            ToolCall(index=at, id=message.call_id(task, at), name=call.name, arguments=call.arguments)
            for at, call in enumerate(read.calls)
        ]
        thought = {"reasoning": Reasoning(text=read.reasoning, grounding=[])} if read.reasoning else {}
        return {"content": read.content, **({"tool_calls": calls} if calls else {}), **thought}


_IN_WORDS = ("answer", "caption")


def count(request: CountRequest) -> dict[str, Any]:
    """The result of `count`: words."""
    known = {"max_model_len": CONTEXT, "model": MODEL}
    if request.token_ids is not None:
        return {"counts": [*map(len, request.token_ids)], "texts": [""] * len(request.token_ids), **known}
    texts = [json.dumps(request.messages)] if request.texts is None else request.texts
    found = [tokens_of(text) for text in texts]
    ids = {"token_ids": found} if request.with_ids else {}
    tokens = {"tokens": [*map(words_of, texts)]} if request.with_tokens else {}
    return {"counts": [*map(len, found)], **ids, **tokens, **known}
