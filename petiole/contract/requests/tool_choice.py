"""Which tools a conversation may call: `tool_choice`, in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from petiole.contract.errors import InvalidRequest, shorten


@dataclass(frozen=True)
class ToolChoice:
    """`tools`: those that may be called, as `{"name", "parameters", "strict"}`. `least`, `most`: how many calls
    there must be, and may be; None: any number. `named`: they are fewer than the tools that the model sees."""

    tools: Sequence[Mapping[str, Any]]
    least: int
    most: int | None
    named: bool = False

    @property
    def enforced(self) -> bool:
        """Whether what the model does by itself is not enough."""
        strict = any(tool.get("strict") is True for tool in self.tools)
        return bool(self.tools) and (self.least > 0 or self.most is not None or self.named or strict)


def checked_choice(value: object) -> Literal["auto", "none", "required"] | dict[str, Any]:
    """Raises InvalidRequest."""
    if value in ("auto", "none", "required") or _names(value) is not None:
        return value  # type: ignore[return-value]
    raise InvalidRequest(
        "tool_choice", "must be auto, none, required, a function or allowed_tools", shorten(value)
    )


def check_names(choice: object, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Whether the tools of a choice are among the tools. Raises InvalidRequest."""
    if choice in ("auto", "none"):
        return
    known = {tool["name"] for tool in map(_function, tools or ())}
    if not known:
        raise InvalidRequest("tool_choice", "needs tools that are functions with names", shorten(choice))
    for name in _names(choice) or ():
        if name not in known:
            raise InvalidRequest("tool_choice", f"must name a tool: {', '.join(sorted(known))[:200]}", name)


def choice_of(choice: object, tools: Sequence[Mapping[str, Any]], parallel: bool) -> ToolChoice:
    functions = [tool for tool in map(_function, tools) if tool["name"]]
    most = None if parallel else 1
    if choice == "none":
        return ToolChoice((), 0, 0)
    names = _names(choice)
    chosen = functions if names is None else [tool for tool in functions if tool["name"] in names]
    mode = "auto"
    match choice:
        case "required" | {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}:
            mode = "required"
        case {"type": "allowed_tools", "mode": "required"}:
            mode = "required"
        case {"type": "function"}:
            return ToolChoice(chosen, 1, 1, named=True)
    return ToolChoice(chosen, 1 if mode == "required" else 0, most, named=names is not None)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's name, parameters and strictness; an empty name if it is no function."""
    inner = tool.get("function", tool)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return {"name": ""}
    return {key: inner[key] for key in ("name", "parameters", "strict") if key in inner}


def _names(choice: object) -> list[str] | None:
    """The tools that a choice names; None if it names none, or has another form."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [*given]}}:
            pass
        case {"type": "allowed_tools", "mode": "auto" | "required", "tools": [*given]}:
            pass
        case _:
            return None
    names = [_function(tool)["name"] for tool in given if isinstance(tool, Mapping)]
    return names if names and all(names) and len(names) == len(given) else None
