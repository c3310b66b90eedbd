"""Validates requests: the base of the classes that declare options, and the one function that checks a request by
them. Its errors name the option, the limit and the value.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from petiole.contract.errors import InvalidRequest, shorten
from petiole.contract.requests.bounds import Bounded
from petiole.contract.requests.submission import SUBMISSION


@dataclass(frozen=True)
class Given:
    """In a field's type: callers may also give a value of this type. It is converted to the field's own type."""

    hint: Any


class Declared(Bounded):
    """Base of the classes that declare options. An option is declared in one place, a field: its type, limits and
    default, and below them its meaning. `python -m docs.render` writes `types` and the tables of docs/requests.md
    from these fields.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def listed(value: object) -> object:
    """One text is a list of it."""
    return [value] if isinstance(value, str) else value


R = TypeVar("R", bound=Declared)

_LIMITS = {
    "missing": "is required",
    "extra_forbidden": "is not an option of this task",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "string_too_long": "must have at most {max_length} characters",
}


def validate(kind: type[R], options: Mapping[str, Any]) -> R:
    """`options` as a request. Raises `InvalidRequest` for its first error.

    Unknown options are reported first: a misspelt one also makes the intended one missing.
    """
    for name in options:
        # pydantic reports no name with a lone surrogate
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            raise InvalidRequest(ascii(name)[1:-1], _LIMITS["extra_forbidden"], shorten(options[name]))
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        refused = _first(error, kind.model_fields)
    try:
        raise refused  # no error that knows the options is behind it
    finally:
        del refused  # and none knows this frame twice: only a rare search for cycles would free the options


def _first(error: ValidationError, known: Collection[str]) -> InvalidRequest:
    details = error.errors(include_url=False)
    return _invalid(min(details, key=lambda detail: detail["type"] != "extra_forbidden"), known)


def _invalid(error: ErrorDetails, known: Collection[str]) -> InvalidRequest:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        cause.__context__ = None
        return cause.with_traceback(None)
    name, *rest = (part for part in error["loc"] if part != "[key]")
    field = str(name) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    value = "nothing" if error["type"] == "missing" else shorten(error["input"])
    limit = limit_of(error)
    hint = instead_of(field, known) if error["type"] == "extra_forbidden" else ""
    return InvalidRequest(field, f"{limit} ({hint})" if hint else limit, value)


def limit_of(error: ErrorDetails) -> str:
    """What pydantic found, in the words of all errors here, such as "must be at most 20"."""
    kind, context = error["type"], error.get("ctx", {})
    if context.get("min_length") == 1:
        return "must not be empty"
    if kind in _LIMITS:
        return _LIMITS[kind].format(**context)
    return error["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)


# ------------------------------------------------------------ hints: names from other APIs, and misspelt names


_ELSEWHERE = {
    "best_of": "submit a group, each with a seed of its own",
    "functions": "tools",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "include_stop_str_in_output": "include_stop",
    "json_mode": "json_schema",
    "length_penalty": "there is no beam search",
    "lora": "adapter",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, which counts the output alone",
    "max_new_tokens": "max_tokens",
    "n": "submit a group, each with a seed of its own",
    "num_predict": "max_tokens",
    "response_format": "json_schema, which takes a schema or a pydantic class; or regex, choice, grammar",
    "stop_sequences": "stop",
    "stream": "every task has a stream: generate.stream(...), or stream(result)",
    "stream_options": "the result has the usage: result.get()['usage']",
    "system": 'the first of the messages, {"role": "system", "content": ...}',
    "timeout": "deadline_s for the generation, timeout_s for a reader of its stream, timeout of get()",
    "top_logprobs": "logprobs, the number of likeliest tokens",
    "typical_p": "min_p or top_p",
    "user": "salt, to keep prefix caches apart; headers={'tenant': ...} for shares",
}
_OTHER_TASK = {
    **dict.fromkeys(("messages", "tools", "chat_template_kwargs", "tool_choice"), "chat"),
    **dict.fromkeys(("reasoning_effort", "max_reasoning_tokens"), "chat"),
    "prompt": "generate",
    "texts": "embed and count",
    "question": "query",
    "object": "point and detect",
    "image": "query, caption, point and detect; in a chat an image is a part of a message",
}


def instead_of(name: str, known: Collection[str]) -> str:
    """What to write in place of the option `name`, for a task with the options `known`; "" if no option is
    similar."""
    if name in SUBMISSION:
        return (
            "it belongs to the submission: an argument of delay, stream or apply_async, or .set() of a signature"
        )
    if name in _ELSEWHERE:
        return f"use {_ELSEWHERE[name]}" if _ELSEWHERE[name].split()[0].strip(",:;") in known else _ELSEWHERE[name]
    if name in _OTHER_TASK:
        return f"it is one of {_OTHER_TASK[name]}"
    near = difflib.get_close_matches(name, known, 1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else ""
