"""Tools as clients of responses write them, and as a task takes them. Pure.

A tool of type `namespace` has functions under names of its own. The model sees `namespace__name`; the client says
and gets the two apart. A tool of type `custom` takes text (`foreign.text_tools`). Tools of other types are
skipped: a client offers what it has, and the model uses none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_TOOLS
from petiole.gateway.core.foreign import text_tools, unknown
from petiole.tasks.errors import InvalidRequest

Tool = Mapping[str, Any]

CALLED = ("function", "custom")
"""The types of tools that become functions."""
_KNOWN = (*CALLED, "namespace")

_DEFAULTS: dict[str, Any] = {"description": None, "parameters": None, "strict": None}
_CHECKED = ("type", "name", *_DEFAULTS, "format")
_FORMS: dict[str, tuple[type, str]] = {
    "description": (str, "text"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}


class Name(NamedTuple):
    """What a client calls a function."""

    namespace: str | None
    name: str

    @property
    def joined(self) -> str:
        """What the model calls it."""
        if not self.namespace:
            return self.name
        between = "" if self.namespace.endswith("__") else "__"
        return f"{self.namespace}{between}{self.name}"

    @property
    def said(self) -> dict[str, str]:
        """As the fields of a call."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


def functions(given: Sequence[Tool], where: str = "tools") -> list[dict[str, Any]]:
    """The tools of a task. `where`: the list's field. Raises `InvalidRequest`."""
    found: dict[str, dict[str, Any]] = {}
    for place, (field, name, tool) in enumerate(_functions(given, where)):
        for part, (form, said) in _FORMS.items():
            if not isinstance(tool.get(part), form | None):
                raise InvalidRequest(f"{field}.{part}", f"must be {said}", shorten(tool[part]))
        if name.joined in found:
            raise InvalidRequest(f"{field}.name", "must be the only function with this name", shorten(name.joined))
        if tool["type"] == "custom":
            own = place if where == "tools" else text_tools.MOST_READ  # of others only the request's own are read
            made = text_tools.function(field, name.joined, tool, own)
        else:
            made = {"name": name.joined} | {key: tool[key] for key in _DEFAULTS if tool.get(key) is not None}
        found[name.joined] = {"type": "function", "function": made}
    return [*found.values()]


def names(given: Sequence[Tool]) -> dict[str, Name]:
    """By the model's name of a function: the client's."""
    return {name.joined: name for _, name, _ in _functions(given)}


def custom(given: Sequence[Tool]) -> list[str]:
    """The model's names of the tools that take text."""
    last = {name.joined: tool["type"] for _, name, tool in _functions(given)}
    return [name for name, kind in last.items() if kind == "custom"]


def callable_only(field: str, given: object) -> list[dict[str, Any]]:
    """The tools of an item that a model here can call, as a response repeats them. Raises `InvalidRequest`."""
    if not isinstance(given, list):
        raise InvalidRequest(field, "must be a list of tools", shorten(given))
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(field, f"must have at most {MAX_TOOLS} tools", len(given))
    for place, tool in enumerate(given):
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{field}[{place}]", "must be a tool", shorten(tool))
    functions(given, field)
    return shown(_checked(given))


def skipped(given: Sequence[Tool]) -> list[str]:
    """The tools that no model here can call, by their types."""
    return unknown.kinds("tools", given, _KNOWN)


def shown(given: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as a response repeats them."""
    defaults: dict[str, dict[str, Any]] = {"function": _DEFAULTS, "namespace": {"description": ""}}
    return [{**defaults.get(str(tool.get("type")), {}), **tool} for tool in given]


def choice(given: Any) -> Any:
    """`tool_choice` as a task takes it, which checks it. Raises `InvalidRequest`."""
    match given:
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "name": _joined(given, name)}
        case {"type": "allowed_tools", "tools": [*allowed]}:
            kept = [
                {"type": "function", "name": _joined(tool, tool["name"])}
                for tool in allowed
                if isinstance(tool, Mapping) and tool.get("type") in CALLED and isinstance(tool.get("name"), str)
            ]
            if not kept:
                raise InvalidRequest("tool_choice.tools", "must have a function", shorten(allowed))
            return {**given, "tools": kept}
    return given


def _checked(given: Sequence[Tool], types: Sequence[str] = _KNOWN) -> list[dict[str, Any]]:
    """The tools that can be called, with the fields that are checked."""
    return [
        {name: tool[name] for name in _CHECKED if name in tool}
        | ({"tools": _checked(tool["tools"], CALLED)} if tool["type"] == "namespace" else {})
        for tool in given
        if isinstance(tool, Mapping) and tool.get("type") in types
    ]


def _joined(given: Tool, name: str) -> str:
    namespace = given.get("namespace")
    return Name(namespace if isinstance(namespace, str) else None, name).joined


def _functions(given: Sequence[Tool], where: str = "tools") -> Iterator[tuple[str, Name, Tool]]:
    """Each function: its field, its name, and what the client says of it. Raises `InvalidRequest`."""
    for place, tool in enumerate(given):
        field = f"{where}[{place}]"
        match tool:
            case {"type": "function" | "custom"}:
                yield field, Name(None, _name(field, tool)), tool
            case {"type": "namespace", "tools": [*inner]}:
                namespace = _name(field, tool)
                for k, one in enumerate(inner):
                    if isinstance(one, Mapping) and one.get("type") in CALLED:
                        name = Name(namespace, _name(f"{field}.tools[{k}]", one))
                        yield f"{field}.tools[{k}]", name, _told(tool, one)
            case {"type": "namespace"}:
                raise InvalidRequest(f"{field}.tools", "must be a list of tools", shorten(tool.get("tools")))
            case {"type": str()}:
                pass
            case _:
                raise InvalidRequest(f"{field}.type", "must be text", shorten(tool.get("type")))


def _told(namespace: Tool, tool: Tool) -> Tool:
    """A function of a namespace, with what is said of both."""
    texts = [one["description"] for one in (namespace, tool) if isinstance(one.get("description"), str)]
    return {**tool, "description": "\n".join(texts) or None}


def _name(field: str, tool: Tool) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.name", "must be text", shorten(name))
    return name
