"""What other servers' clients call what has a name here: vLLM's earlier `guided_*`, SGLang's `regex` and
`json_schema`, OpenRouter's `reasoning`, and the switches of thinking of DeepSeek, Qwen and Ollama. Pure.

A parameter under the name of this server wins over the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from petiole import json_text
from petiole.contract.errors import shorten
from petiole.contract.requests.images import View
from petiole.tasks.errors import InvalidRequest

_CONSTRAINTS = {
    "guided_json": "json",
    "guided_choice": "choice",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
}
_ON = {"enable_thinking": True, "thinking": True}
"""What chat templates call it."""


def constraints(given: dict[str, Any]) -> dict[str, Any]:
    """With `structured_outputs` in place of its other spellings. Raises `InvalidRequest`."""
    found = {name: given[name] for name in _CONSTRAINTS if name in given}
    if not found:
        return given
    rest = {name: value for name, value in given.items() if name not in found}
    structured = rest.get("structured_outputs", {})
    if not isinstance(structured, dict):
        return rest
    asked = {kind: value for kind, value in structured.items() if value is not None}
    for name, value in found.items():
        kind = _CONSTRAINTS[name]
        if kind in asked:
            raise InvalidRequest(name, f"cannot be combined with another {kind}", "both")
        asked[kind] = _schema(name, value) if kind == "json" else value
    return rest | {"structured_outputs": asked}


def _schema(name: str, value: object) -> object:
    """A schema may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json_text.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise InvalidRequest(name, "must be a JSON schema", shorten(value)) from None


_VIEWS = {
    "size.shortest_edge": "min_pixels",
    "size.longest_edge": "max_pixels",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "fps": "fps",
}
"""Newer processors take both limits in their `size`."""


def view(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `mm_processor_kwargs` as how a model is to look at all images and videos. Raises `InvalidRequest`."""
    at, size = "mm_processor_kwargs", given.get("size")
    inner = size if isinstance(size, dict) else {}
    said = {f"size.{name}": value for name, value in inner.items()}
    said |= {name: value for name, value in given.items() if value is not inner}
    for name, value in said.items():
        if value is not None and name not in _VIEWS:
            raise InvalidRequest(f"{at}.{name[:64]}", f"is not served: {', '.join(_VIEWS)} are", shorten(value))
    asked = {_VIEWS[name]: value for name, value in said.items() if value is not None}
    View(**asked).check(at, video=True)
    return asked


def thinking(given: dict[str, Any]) -> dict[str, Any]:
    """With `reasoning_effort`, `thinking_token_budget`, `include_reasoning` and `chat_template_kwargs` in place of
    other spellings. Raises `InvalidRequest`."""
    rest, said = dict(given), dict[str, Any]()
    if "reasoning" in rest:
        said |= _reasoning(rest.pop("reasoning"))
    for name in ("thinking", "think", "enable_thinking"):
        if name in rest:
            said |= _switch(name, rest.pop(name))
    if "thinking_budget" in rest:
        said["thinking_token_budget"] = rest.pop("thinking_budget")
    if said.pop("on", False) and "reasoning_effort" not in rest:
        variables = rest.get("chat_template_kwargs") or {}
        rest["chat_template_kwargs"] = {**_ON, **variables} if isinstance(variables, dict) else variables
    return said | rest


def _reasoning(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("reasoning", "must be an object", shorten(value))
    said: dict[str, Any] = {}
    match value.get("effort"):
        case None:
            pass
        case str(effort):
            said["reasoning_effort"] = effort
        case other:
            raise InvalidRequest("reasoning.effort", "must be text", shorten(other))
    if value.get("max_tokens") is not None:
        said["thinking_token_budget"] = value["max_tokens"]
    if value.get("exclude") is True:
        said["include_reasoning"] = False
    if isinstance(on := value.get("enabled"), bool) and "reasoning_effort" not in said:
        said |= {"on": True} if on else {"reasoning_effort": "none"}
    return said


def _switch(name: str, value: object) -> dict[str, Any]:
    match value:
        case True | {"type": "adaptive"}:
            return {"on": True}
        case False | {"type": "disabled"}:
            return {"reasoning_effort": "none"}
        case {"type": "enabled", **more}:
            budget = more.get("budget_tokens")
            return {"on": True} | ({} if budget is None else {"thinking_token_budget": budget})
        case str(effort) if name == "think":
            return {"reasoning_effort": effort}
    raise InvalidRequest(name, "must be true, false, or of type enabled or disabled", shorten(value))
