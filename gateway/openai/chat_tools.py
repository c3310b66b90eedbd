"""Tools as clients of chat/completions write them, and as a task takes them. Pure.

A tool of type `custom` takes text (`foreign.text_tools`). Tools of other types, but functions, are skipped: no
model here can call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.contract.errors import shorten
from petiole.gateway.core.foreign import text_tools, unknown
from petiole.tasks.errors import InvalidRequest

Tool = Mapping[str, Any]

_CALLED = ("function", "custom")


def functions(given: Sequence[Tool]) -> list[Any]:
    """The tools of a task, which checks functions. Raises `InvalidRequest`."""
    found: list[Any] = []
    for place, tool in enumerate(given):
        match tool:
            case {"type": "custom", "custom": {"name": str(name)} as inner}:
                made = text_tools.function(f"tools[{place}].custom", name, inner, place)
                found.append({"type": "function", "function": made})
            case {"type": "custom"}:
                raise InvalidRequest(f"tools[{place}].custom", "must be an object with a name", shorten(tool))
            case {"type": str(kind)} if kind not in _CALLED:
                pass
            case _:
                found.append(tool)
    return found


def custom(given: Sequence[Tool]) -> list[str]:
    """The names of the tools that take text."""
    return [tool["custom"]["name"] for tool in given if tool.get("type") == "custom"]


def skipped(given: Sequence[Tool]) -> list[str]:
    """The tools that no model here can call, by their types."""
    return unknown.kinds("tools", given, _CALLED)


def choice(given: Any) -> Any:
    """`tool_choice` as a task takes it, which checks it."""
    match given:
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed], **more}}:
            return {**given, "allowed_tools": {**more, "tools": [choice(tool) for tool in allowed]}}
    return given


def as_function_call(call: Any) -> Any:
    """A call in a conversation, of a function in place of one that takes text."""
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}, **more}:
            function = {"name": name, "arguments": text_tools.arguments(text)}
            return {**more, "type": "function", "function": function}
    return call
