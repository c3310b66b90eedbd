"""A whole output as a message: its content, its reasoning, its calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from petiole.tasks.templates.formats import Format
from petiole.tasks.templates.parser import CallArguments, CallBegun, CallEnded, Content, Event, Parser, Reasoning
from petiole.tasks.templates.template import Tools

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass
class Call:
    """`complete`: the arguments are a JSON object."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Message:
    """`spans`: where reasoning is in the raw text, with its marks."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    spans: Sequence[tuple[int, int]] = ()

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegun(_, name):
                self.calls.append(Call(name))
            case CallArguments(call, text):
                self.calls[call].arguments += text
            case CallEnded(call, complete):
                self.calls[call].complete = complete


def read(format: Format, text: str, *, prompt_end: str = "", tools: Tools | None = None) -> Message:
    """The message that a whole output is."""
    parser, message = Parser(format.template, prompt_end=prompt_end, tools=tools), Message()
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
