"""Turns a message's arguments into a request. In a chain, the result of the previous task is among the
arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.requests.celery_options import SUBMISSION
from petiole.tasks.requests.kinds import CONTINUED, OF_TEXTS, SCHEMAS
from petiole.tasks.requests.names import CHAT
from petiole.tasks.requests.schemas import Common, validate

_MOST_GROUPS = 64


def apart(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a request, and the options of its submission."""
    request = {name: value for name, value in options.items() if name not in SUBMISSION}
    return request, {name: options[name] for name in options.keys() - request.keys()}


def parse(name: str, given: Sequence[object], options: Mapping[str, Any]) -> Common:
    """The request in a message's arguments. Raises `InvalidRequest`."""
    options = dict(options)
    if given:
        if len(given) > 1:
            raise InvalidRequest("args", "must be empty, or the previous task's result", f"{len(given)} of them")
        if _is_conversation(given[0]):
            limit = "must be named: chat.delay(messages=[...])"
            raise InvalidRequest("messages", limit, given[0])
        if name == CHAT:
            messages = options.get("messages", [])
            if not isinstance(messages, list):
                raise InvalidRequest("messages", "must be a list", messages)
            options["messages"] = [*messages, {"role": "user", "content": text_of(given[0])}]
        elif name in OF_TEXTS:
            texts = options.get("texts", [])
            if not isinstance(texts, list):
                raise InvalidRequest("texts", "must be a list if the previous task's result is appended", texts)
            options["texts"] = [*texts, *map(text_of, given[0] if isinstance(given[0], list) else [given[0]])]
        elif name in CONTINUED:
            option = CONTINUED[name]
            before = options.get(option, "")
            if not isinstance(before, str):
                raise InvalidRequest(option, "must be text if the previous task's result is appended", before)
            options[option] = before + text_of(given[0])
        else:
            raise InvalidRequest("args", "must be empty: this task takes no text", "a result")
    return validate(SCHEMAS[name], options)


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
