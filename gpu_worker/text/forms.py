"""Which forms of a message a chat template reads.

OpenAI's API has forms that few templates read: `content` as a list of text parts, and a tool call's `arguments` as
JSON text. Some templates read nothing else: SmolVLM2's leaves out a `content` that is a string, and DeepSeek-R1's
writes `arguments` as text, and knows a tool call by a `content` of null. Nothing in a checkpoint says so. So the
template renders small conversations, and what it writes tells. A message keeps the form that its caller gave where
the template reads this form, and takes the other one where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str | None]
"""Renders messages and tools; None if the template refuses them."""

_WORD = "petiole_word"
_ARGUMENTS = {"petiole_key": "petiole_value"}
_AS_TEXT = json.dumps(_ARGUMENTS)
_TOOL = {
    "type": "function",
    "function": {"name": "tool", "description": "a", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Texts:
    """strings, parts: whether a text shows that is a message's `content`, or the one part in it. A template that
    refuses both needs more than one message: it reads strings."""

    strings: bool
    parts: bool

    @classmethod
    def of(cls, render: Render, roles: Sequence[str] = ("user",)) -> Self:
        text = f"{_WORD} {_WORD}"
        part = {"type": "text", "text": text}
        said, in_parts = (
            render([{"role": role, "content": content} for role in roles], None) for content in (text, [part])
        )
        shown = (in_parts or "").lower()
        parts = _WORD in shown and repr(text) not in shown and json.dumps(text) not in shown  # as data
        return cls(not parts if said is None else _WORD in said.lower(), parts)


@dataclass(frozen=True, slots=True)
class Calls:
    """`null_content`: a message with tool calls needs `content`, if only as null. `text_arguments`,
    `object_arguments`: the forms of a call's `arguments` that are rendered as JSON or value by value."""

    null_content: bool
    text_arguments: bool
    object_arguments: bool

    @classmethod
    def of(cls, render: Render) -> Self:
        missing, null = (
            [_reads_calls(render, content, form) for form in "to"] for content in ({}, {"content": None})
        )
        needs_null = any(null) and not any(missing)
        text, data = null if needs_null else missing
        return cls(needs_null, text, data)

    def adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of the assistant in a form that the template reads."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        content = {"content": None} if self.null_content and "content" not in message else {}
        return {**message, **content, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Any) -> Any:
        match call:
            case {"function": dict() as function}:
                return {**call, "function": self._call(function)}
            case {"arguments": str(text)} if not self.text_arguments:
                return {**call, "arguments": _object_in(text)}
            case {"arguments": dict(arguments)} if self.text_arguments and not self.object_arguments:
                return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call


def _object_in(text: str) -> Any:
    """The object that is written as JSON in `text`; `text` itself if none is."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _reads_calls(render: Render, content: dict[str, Any], form: str) -> bool:
    """Whether the template reads a call whose `arguments` are text ("t") or an object ("o")."""
    function = {"name": "tool", "arguments": _AS_TEXT if form == "t" else _ARGUMENTS}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    asked, called = {"role": "user", "content": "a"}, {"role": "assistant", **content, "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "abcdefghi", "name": "tool", "content": "b"}
    for messages, tools in product(([asked, called, answered], [asked, called], [called]), ([_TOOL], None)):
        text = render(messages, tools)
        if text is not None:
            return _AS_TEXT in text if form == "t" else _shows_values(text)
    return False


def _shows_values(text: str) -> bool:
    """Whether the names and values of an object are in a text, and not as Python would write them."""
    (key, value), *_ = _ARGUMENTS.items()
    return key in text and value in text and repr(key) not in text
