"""Turns a message's arguments into a request. In a chain, the result of the previous task is among the
arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.contract.requests.bounds import check_values
from petiole.contract.requests.generation import Common
from petiole.contract.requests.submission import SUBMISSION
from petiole.contract.requests.validation import validate
from petiole.contract.tasks import TASKS
from petiole.tasks.errors import InvalidRequest

_MOST_GROUPS = 64


def apart(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a request, and the options of its submission."""
    request = {name: value for name, value in options.items() if name not in SUBMISSION}
    return request, {name: options[name] for name in options.keys() - request.keys()}


def parse(name: str, given: Sequence[object], options: Mapping[str, Any]) -> Common:
    """The request in a message's arguments. Raises `InvalidRequest`."""
    check_values(options)
    options = dict(options)
    if given:
        if len(given) > 1:
            raise InvalidRequest("args", "must be empty, or the previous task's result", f"{len(given)} of them")
        if _is_conversation(given[0]):
            limit = "must be named: chat.delay(messages=[...])"
            raise InvalidRequest("messages", limit, given[0])
        options |= _filled(TASKS[name].filled, given[0], options)
    return validate(TASKS[name].request, options)


def _filled(option: str | None, result: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option that takes the previous task's result."""
    if option is None:
        raise InvalidRequest("args", "must be empty: this task takes no text", "a result")
    before = options.get(option, [] if option in ("messages", "texts") else "")
    match option:
        case "messages":
            if not isinstance(before, list):
                raise InvalidRequest(option, "must be a list", before)
            return {option: [*before, {"role": "user", "content": text_of(result)}]}
        case "texts":
            if not isinstance(before, list):
                limit = "must be a list if the previous task's result is appended"
                raise InvalidRequest(option, limit, before)
            return {option: [*before, *map(text_of, result if isinstance(result, list) else [result])]}
    if not isinstance(before, str):
        raise InvalidRequest(option, "must be text if the previous task's result is appended", before)
    return {option: before + text_of(result)}


def _is_conversation(given: object) -> bool:
    return isinstance(given, list) and any(isinstance(one, dict) and "role" in one for one in given)


def text_of(result: object, depth: int = 0) -> str:
    """The text of a previous task's result: text, a generation's result, or a list of either (a group's results,
    in which there may be groups)."""
    if depth > _MOST_GROUPS:
        raise InvalidRequest("args[0]", f"must be nested at most {_MOST_GROUPS} deep", "deeper")
    match result:
        case str():
            return result
        case {"text": str(text)}:
            return text
        case list():
            return "\n".join(text_of(one, depth + 1) for one in result)
    raise InvalidRequest("args[0]", "must be text, a generation's result, or a list of these", result)
