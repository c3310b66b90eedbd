"""A whole output as a message: its content, its reasoning, its calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from petiole.tasks.output_parsing.formats import ToolFormat
from petiole.tasks.output_parsing.parser import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
)
from petiole.tasks.output_parsing.template import Tools

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass
class ParsedCall:
    """`complete`: the arguments are a JSON object."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class ParsedMessage:
    """`spans`: where reasoning is in the raw text, with its marks."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    spans: Sequence[tuple[int, int]] = ()

    def add(self, event: Event) -> None:
        match event:
            case ContentDelta(text):
                self.content += text
            case ReasoningDelta(text):
                self.reasoning += text
            case CallStarted(_, name):
                self.calls.append(ParsedCall(name))
            case ArgumentsDelta(call, text):
                self.calls[call].arguments += text
            case CallEnded(call, complete):
                self.calls[call].complete = complete


def read(format: ToolFormat, text: str, *, prompt_end: str = "", tools: Tools | None = None) -> ParsedMessage:
    """The message that a whole output is."""
    parser, message = Parser(format.template, prompt_end=prompt_end, tools=tools), ParsedMessage()
    for event in [*parser.push(text), *parser.finish()]:
        message.add(event)
    message.spans = parser.spans
    return message


def call_id(task_id: str, call: int) -> str:
    """The id of a call. It follows from the task, so it is the same wherever the call is read. Nine letters and
    digits, because Mistral's chat templates refuse anything else."""
    number = int.from_bytes(hashlib.blake2b(f"{task_id} {call}".encode(), digest_size=8).digest(), "big")
    letters = ""
    for _ in range(9):
        number, letter = divmod(number, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters
