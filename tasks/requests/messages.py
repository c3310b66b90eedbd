"""The rules for a task's message, in one table: producers refuse a submission by it, and a worker's gate a
message.

Celery reads some headers, and copies all of them into the attributes of its request (`Context`). A header may be

    known       part of Celery's message protocol: its value must obey `KNOWN`
    reserved    named like another attribute of the request: it would replace a method or a value of the worker's
    custom      any other name, with any value
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from numbers import Real
from typing import Any

from celery.app.task import Context
from celery.utils.time import maybe_iso8601
from kombu import compression
from kombu.serialization import prepare_accept_content, registry

from petiole.tasks.errors import InvalidRequest

ID_BYTES = 255
LONGEST_LIMIT_S = 10**9
FARTHEST_S = 10**10
LARGEST_INT = 2**31 - 1
YEARS = range(1970, 9000)


def encodes(value: object) -> bool:
    """Whether `value` can be encoded as UTF-8: a lone surrogate cannot be part of a Redis key."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_id(value: object) -> bool:
    return isinstance(value, str) and encodes(value) and 0 < len(value.encode()) <= ID_BYTES


def is_time(value: object) -> bool:
    """Whether `value` is a datetime, or text with one in ISO 8601."""
    if isinstance(value, str):
        try:
            value = maybe_iso8601(value)
        except Exception:
            return False
    return isinstance(value, datetime) and value.year in YEARS


def is_number(value: object, least: float, most: float) -> bool:
    """Whether `value` is a finite number. False and True are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return least <= value <= most  # type: ignore[operator]  # false for NaN


def is_int(value: object, least: int = 0, most: int = LARGEST_INT) -> bool:
    return type(value) is int and least <= value <= most


def is_limit(value: object) -> bool:
    """Whether `value` is a time limit. As in Celery, 0 means no limit."""
    return value is None or is_number(value, 0, LONGEST_LIMIT_S)


def is_compression(value: object) -> bool:
    try:
        compression.get_encoder(value)  # type: ignore[no-untyped-call]
    except (KeyError, TypeError):
        return False
    return True


def _is_limits(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_limit, value))


def _is_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(encodes, value))


ID = f"must be text of 1 to {ID_BYTES} bytes as UTF-8"
_TEXT = encodes, "must be text that UTF-8 can encode"
_SHOWN = lambda value: isinstance(value, str), "must be text"
_TIME = is_time, f"must be a time in ISO 8601, of the years {YEARS.start} to {YEARS.stop - 1}"
_INT = is_int, f"must be a whole number from 0 to {LARGEST_INT}"
_LIMIT = f"a number of seconds from 0 to {LONGEST_LIMIT_S}, or null"

Rule = tuple[Callable[[object], bool], str]

KNOWN: dict[str, Rule] = {
    "task": _TEXT,
    "id": (is_id, ID),
    "root_id": _TEXT,
    "parent_id": _TEXT,
    "group": _TEXT,
    "shadow": _TEXT,
    "argsrepr": _SHOWN,
    "kwargsrepr": _SHOWN,
    "origin": _TEXT,
    "eta": _TIME,
    "expires": _TIME,
    "retries": _INT,
    "group_index": _INT,
    "replaced_task_nesting": _INT,
    "timelimit": (_is_limits, f"must be two limits, each {_LIMIT}"),
    "ignore_result": (lambda value: isinstance(value, bool), "must be true or false"),
    "stamps": (lambda value: isinstance(value, dict), "must be an object"),
    "stamped_headers": (_is_names, "must be a list of names"),
    "compression": (is_compression, "must be a compression that this installation has"),
    "headers": (lambda value: isinstance(value, dict), "must be an object"),
}
"""By header, its rule. Each header may also be null, or missing."""

RESERVED = frozenset(dir(Context)) - KNOWN.keys()
SET_BY_CELERY = frozenset({"task", "id", "compression"})


def first_wrong(headers: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first known header with a wrong value, and what the value must be."""
    for name, (right, limit) in KNOWN.items():
        value = headers.get(name)
        if value is not None and not right(value):
            return name, limit
    return None


def _is_seconds_or_time(value: object) -> bool:
    return is_time(value) or is_number(value, -FARTHEST_S, FARTHEST_S)


_OPTIONS: dict[str, Rule] = {
    "task_id": (is_id, ID),
    "expires": (_is_seconds_or_time, f"must be a time, or seconds from now, at most {FARTHEST_S}"),
    "eta": _TIME,
    "countdown": (
        lambda value: is_number(value, -FARTHEST_S, FARTHEST_S),
        f"must be at most {FARTHEST_S} s",
    ),
    "priority": (lambda value: is_int(value, -LARGEST_INT), "must be a whole number"),
    "time_limit": (is_limit, f"must be {_LIMIT}"),
    "soft_time_limit": (is_limit, f"must be {_LIMIT}"),
    "compression": KNOWN["compression"],
    "shadow": _TEXT,
    "reply_to": _TEXT,
    "headers": (lambda value: isinstance(value, Mapping), "must be an object"),
}


def check_submission(options: Mapping[str, Any], accepted: Any) -> None:
    """Raise `InvalidRequest` for the first of Celery's `options` that no worker would take. `accepted`: the app's
    `accept_content`."""
    for name, (right, limit) in _OPTIONS.items():
        value = options.get(name)
        if value is not None and not right(value):
            raise InvalidRequest(name, limit, value)
    for name, value in (options.get("headers") or {}).items():
        if not encodes(name):
            raise InvalidRequest("headers", "must have names of text that UTF-8 can encode", repr(name))
        if name in RESERVED or name in SET_BY_CELERY:
            raise InvalidRequest(f"headers.{name}", "must have another name: this one is Celery's own", value)
    if wrong := first_wrong(options.get("headers") or {}):
        name, limit = wrong
        raise InvalidRequest(f"headers.{name}", limit, options["headers"][name])
    serializer = options.get("serializer")
    if serializer is not None:
        kind = registry.name_to_type.get(serializer) if isinstance(serializer, str) else None
        if kind not in prepare_accept_content(accepted):  # type: ignore[no-untyped-call]
            raise InvalidRequest("serializer", f"must be one of {', '.join(sorted(accepted))}", serializer)
