"""Tools that take text in place of arguments: OpenAI's type `custom`. Pure.

Models call functions alone. So such a tool is a function with one text, `input`, and a call of the function is
shown as a call of the tool: its arguments are read as they come, and the text in them is what the client gets. A
regular expression becomes the text's pattern, which is enforced. Grammars are told to the model. One that has an
expression (`lark`) becomes the pattern, too: it is enforced where the request enforces calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from petiole.contract.errors import shorten
from petiole.gateway.core.foreign import lark
from petiole.tasks.errors import InvalidRequest

MOST_READ = 8
"""Tools of a list whose grammars are read: each may take milliseconds."""

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGINNING = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def function(field: str, name: str, tool: Mapping[str, Any], place: int = 0) -> dict[str, Any]:
    """The function that stands for a tool. `tool`: its description and format. `place`: its number in the list.
    Raises `InvalidRequest`."""
    text: dict[str, Any] = {"type": "string"}
    said = [tool["description"]] if isinstance(tool.get("description"), str) else []
    made: dict[str, Any] = {"name": name}
    form = tool.get("format")
    inner = form.get("grammar", form) if isinstance(form, Mapping) else {}
    pattern: str | None = None
    match inner:
        case {"syntax": "regex", "definition": str(pattern)}:
            made["strict"] = True
        case {"syntax": str(syntax), "definition": str(grammar)}:
            pattern = lark.expression(grammar) if syntax == "lark" and place < MOST_READ else None
            said.append(f"The input follows this grammar ({syntax}):\n{grammar}")
        case _ if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
            limit = "must be of type text, or grammar with a syntax and a definition"
            raise InvalidRequest(f"{field}.format", limit, shorten(form))
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    if said:
        made["description"] = "\n\n".join(said)
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return {**made, "parameters": {**schema, "additionalProperties": False}}


def arguments(text: str) -> str:
    """The function's arguments, for a call of the tool with this text."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputReader:
    """Reads the text from the function's arguments, as they come. Arguments of another form are the text
    themselves."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "head"

    def push(self, text: str) -> str:
        """What is known of the text after these characters more."""
        self._held += text
        if self._state == "head":
            if (head := _HEAD.match(self._held)) is not None:
                self._state, self._held = "text", self._held[head.end() :]
            elif _BEGINNING.fullmatch(self._held) is None:
                self._state = "raw"
        match self._state:
            case "text":
                return self._unescaped()
            case "raw":
                return self.finish()
        return ""

    def finish(self) -> str:
        """What was held back and is no more decided."""
        held, self._held = self._held, ""
        return held if self._state in ("head", "raw") else ""

    def _unescaped(self) -> str:
        """Up to the closing quote, or to an escape that is not whole."""
        found: list[str] = []
        held, at = self._held, 0
        while at < len(held):
            if held[at] == '"':
                self._state, at = "done", len(held)
            elif held[at] != "\\":
                end = next((k for k in range(at, len(held)) if held[k] in '"\\'), len(held))
                found.append(held[at:end])
                at = end
            elif (escape := _escape(held, at)) is None:
                break
            else:
                found.append(escape[0])
                at += escape[1]
        self._held = held[at:]
        return "".join(found)


def _escape(held: str, at: int) -> tuple[str, int] | None:
    """The character of an escape and its length; None: more must come. A lone surrogate is U+FFFD."""
    if at + 1 >= len(held):
        return None
    if held[at + 1] != "u":
        return _ESCAPES.get(held[at + 1], held[at + 1]), 2
    first = _unit(held, at)
    if first is None:
        return None
    if not 0xD800 <= first < 0xDC00:
        return ("\ufffd" if 0xDC00 <= first < 0xE000 else chr(first)), 6
    if not "\\u".startswith(held[at + 6 : at + 8]):
        return "\ufffd", 6
    second = _unit(held, at + 6)
    if second is None:
        return None
    if 0xDC00 <= second < 0xE000:
        return chr(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00), 12
    return "\ufffd", 6


def _unit(held: str, at: int) -> int | None:
    digits = held[at + 2 : at + 6]
    if len(digits) < 4:
        return None
    return int(digits, 16) if re.fullmatch("[0-9a-fA-F]{4}", digits) else 0xFFFD
