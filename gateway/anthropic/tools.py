"""Tools as clients write them, and as a task takes them. Pure.

Tools that Anthropic runs or describes itself (web search, bash, ...) are skipped: no model here knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.contract.errors import shorten
from petiole.gateway.core.foreign import unknown
from petiole.tasks.errors import InvalidRequest

_NAMELESS = {"auto": "auto", "any": "required", "none": "none"}


def functions(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    found: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(given):
        if (kind := tool.get("type")) not in (None, "custom"):
            if isinstance(kind, str):
                continue
            raise InvalidRequest(f"tools[{place}].type", "must be text", shorten(kind))
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{place}].name", "must be text", shorten(name))
        if name in found:
            raise InvalidRequest(f"tools[{place}].name", "must be the only tool with this name", shorten(name))
        if not isinstance(schema, dict):
            raise InvalidRequest(f"tools[{place}].input_schema", "must be a JSON schema", shorten(schema))
        told = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        found[name] = {"type": "function", "function": {"name": name, **told, "parameters": schema}}
    return [*found.values()]


def skipped(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tools that no model here can call, by their types."""
    return unknown.kinds("tools", given, ("custom",))


def calling(given: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task that are about tools. Raises `InvalidRequest`."""
    match choice:
        case {"type": "tool", "name": str(name)}:
            wanted: Any = {"type": "function", "function": {"name": name}}
        case {"type": "auto" | "any" | "none" as kind}:
            wanted = _NAMELESS[kind]
        case _:
            limit = "must be of type auto, any, none, or tool with a name"
            raise InvalidRequest("tool_choice", limit, shorten(choice))
    offered = functions(given)
    if not offered or wanted == "none":
        if wanted not in ("auto", "none"):
            raise InvalidRequest("tool_choice", "needs tools", shorten(choice))
        return {}
    options: dict[str, Any] = {"tools": offered}
    if wanted != "auto":
        options["tool_choice"] = wanted
    if choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    return options
