"""The constraint on the output, as an option of a task: `response_format`, the `text.format` of responses, and
vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from petiole.contract.errors import shorten
from petiole.tasks.errors import InvalidRequest

_ANY_OBJECT = {"type": "object"}


class FormatOption(NamedTuple):
    """An option of a task, its value, and the client's field, which errors name."""

    option: str
    value: Any
    field: str


def constraint(given: object, structured_outputs: object, field: str = "response_format") -> FormatOption | None:
    """`field`: where the format was given; within `response_format` a schema has an object around it. Raises
    `InvalidRequest`."""
    inside = ".json_schema" if field == "response_format" else ""
    one, other = _of_format(given, field, inside), _of_structured(structured_outputs)
    if one is not None and other is not None:
        raise InvalidRequest("structured_outputs", f"cannot be combined with {field}", "both")
    return one or other


def _of_format(given: object, field: str, inside: str) -> FormatOption | None:
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return FormatOption("json_schema", _ANY_OBJECT, field)
        case {"type": "json_schema", **more}:
            around = more.get("json_schema") if inside else more
            schema = around.get("schema") if isinstance(around, Mapping) else None
            if isinstance(schema, dict):
                return FormatOption("json_schema", schema, f"{field}{inside}.schema")
            raise InvalidRequest(f"{field}{inside}.schema", "must be an object", shorten(schema))
    shown = shorten(given.get("type") if isinstance(given, Mapping) else given)
    raise InvalidRequest(f"{field}.type", "must be text, json_object or json_schema", shown)


def _of_structured(given: object) -> FormatOption | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequest("structured_outputs", "must be an object", shorten(given))
    asked = {kind: value for kind, value in given.items() if value is not None and value is not False}
    if len(asked) > 1:
        raise InvalidRequest("structured_outputs", "must have one kind of constraint", ", ".join(sorted(asked)))
    for kind, value in asked.items():
        field = f"structured_outputs.{kind}"
        match kind:
            case "json":
                return FormatOption("json_schema", value, field)
            case "json_object":
                return FormatOption("json_schema", _ANY_OBJECT, field)
            case "regex" | "choice" | "grammar":
                return FormatOption(kind, value, field)
        raise InvalidRequest(field, "must be json, regex, choice, grammar or json_object", kind)
    return None
