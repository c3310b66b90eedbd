"""The rules for a task's message, in one table: producers refuse a submission by it, and a worker's gate a
message.

Celery reads some headers, and copies all of them into the attributes of its request (`Context`). A header may be

    known       part of Celery's message protocol: its value must obey `KNOWN`
    own         read by Petiole alone: a producer is refused a value that does not obey `OWN`; from a message the
                gate leaves it out
    reserved    named like another attribute of the request: it would replace a method or a value of the worker's
    custom      any other name, with any value

Every name and text in all of them can be encoded, and together they have at most `MOST_CHARACTERS`. Code reads a
header only by its `Header`, so that a header without a rule cannot be read (`tests/project/test_headers.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from numbers import Real
from typing import Any, Generic, TypeVar

from celery.app.task import Context
from celery.utils.time import maybe_iso8601
from kombu import compression
from kombu.serialization import prepare_accept_content, registry

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import (
    AFFINITY_HEADER,
    HELD_HEADER,
    SENT_HEADER,
    TENANT_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
)

ID_BYTES = 255
MOST_CHARACTERS = 2**18
"""The most characters of all names and texts in the headers of a message."""
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


def are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(encodes, value))


ID_LIMIT = f"must be text of 1 to {ID_BYTES} bytes as UTF-8"
_TEXT = encodes, "must be text that UTF-8 can encode"
_SHOWN = lambda value: isinstance(value, str), "must be text"
_TIME = is_time, f"must be a time in ISO 8601, of the years {YEARS.start} to {YEARS.stop - 1}"
_INT = is_int, f"must be a whole number from 0 to {LARGEST_INT}"
_OBJECT = lambda value: isinstance(value, dict), "must be an object"
_LIMIT = f"a number of seconds from 0 to {LONGEST_LIMIT_S}, or null"

Rule = tuple[Callable[[object], bool], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Header(Generic[T]):
    """A header that code reads. A value is right if `rule` says so. `T`: the type of a right value."""

    name: str
    rule: Rule

    def right(self, value: object) -> bool:
        """Null is right: a header that is null counts as missing."""
        return value is None or self.rule[0](value)

    def of(self, headers: Mapping[str, Any]) -> T | None:
        """The header's value in these headers. None: the header is missing, null or wrong."""
        value: T | None = headers.get(self.name)
        return value if self.right(value) else None


ID = Header[str]("id", (is_id, ID_LIMIT))
TASK = Header[str]("task", _TEXT)
ETA = Header[str | datetime]("eta", _TIME)
EXPIRES = Header[str | datetime]("expires", _TIME)
RETRIES = Header[int]("retries", _INT)
NESTING = Header[int]("replaced_task_nesting", _INT)
COMPRESSION = Header[str]("compression", (is_compression, "must be a compression that this installation has"))

KNOWN: dict[str, Header[Any]] = {
    header.name: header
    for header in (
        TASK,
        ID,
        Header[str]("root_id", _TEXT),
        Header[str]("parent_id", _TEXT),
        Header[str]("group", _TEXT),
        Header[str]("shadow", _TEXT),
        Header[str]("argsrepr", _SHOWN),
        Header[str]("kwargsrepr", _SHOWN),
        Header[str]("origin", _TEXT),
        ETA,
        EXPIRES,
        RETRIES,
        Header[int]("group_index", _INT),
        NESTING,
        Header[list[Any]]("timelimit", (_is_limits, f"must be two limits, each {_LIMIT}")),
        Header[bool]("ignore_result", (lambda value: isinstance(value, bool), "must be true or false")),
        Header[dict[str, Any]]("stamps", _OBJECT),
        Header[list[str]]("stamped_headers", (are_names, "must be a list of names")),
        COMPRESSION,
        Header[dict[str, Any]]("headers", _OBJECT),
    )
}
"""Headers of Celery's, by name. Each may also be null, or missing."""


def _is_held(value: object) -> bool:
    match value:
        case [key, *counts] if len(counts) == 3:
            return encodes(key) and all(is_int(count, most=FARTHEST_S) for count in counts)
    return False


SENT = Header[float](SENT_HEADER, (lambda value: is_number(value, 0, FARTHEST_S), "must be a time in seconds"))
TENANT = Header[str](TENANT_HEADER, (is_id, ID_LIMIT))
HELD = Header[list[Any]](HELD_HEADER, (_is_held, f"must be text and three whole numbers from 0 to {FARTHEST_S}"))
AFFINITY = Header[str](AFFINITY_HEADER, (is_id, ID_LIMIT))

_PARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile("[ -~]{1,512}")


def _matches(form: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None


TRACEPARENT = Header[str](
    TRACEPARENT_HEADER, (_matches(_PARENT), "must be 00-TRACE-SPAN-FLAGS in hexadecimal digits, as W3C's is")
)
TRACESTATE = Header[str](TRACESTATE_HEADER, (_matches(_STATE), "must be 1 to 512 printable characters"))

OWN: dict[str, Header[Any]] = {
    header.name: header for header in (SENT, TENANT, HELD, AFFINITY, TRACEPARENT, TRACESTATE)
}
"""Headers of Petiole's own, by name."""

RESERVED = frozenset(dir(Context)) - KNOWN.keys()
SET_BY_CELERY = frozenset({"task", "id", "compression"})
SHOWN = ("argsrepr", "kwargsrepr")
"""Headers that are only logged. Text in them need not be encodable: the gate escapes it."""


def first_wrong(headers: Mapping[str, Any], table: Mapping[str, Header[Any]] = KNOWN) -> tuple[str, str] | None:
    """The first header of `table` with a wrong value, and what the value must be."""
    for name, header in table.items():
        if (value := headers.get(name)) is not None and not header.right(value):
            return name, header.rule[1]
    return None


def wrong_text(value: object) -> str | None:
    """What is wrong with the names and texts in `value`, at any depth: the limit. None: nothing."""
    left, waiting = MOST_CHARACTERS, [value]
    while waiting:
        match waiting.pop():
            case str(text):
                if not encodes(text):
                    return "must have only text that UTF-8 can encode"
                left -= len(text)
            case dict(inner):
                waiting += (*inner, *inner.values())
            case list(inner) | tuple(inner):
                waiting += inner
        if left < 0:
            return f"must have at most {MOST_CHARACTERS} characters"
    return None


def _is_seconds_or_time(value: object) -> bool:
    return is_time(value) or is_number(value, -FARTHEST_S, FARTHEST_S)


_OPTIONS: dict[str, Rule] = {
    "task_id": ID.rule,
    "expires": (_is_seconds_or_time, f"must be a time, or seconds from now, at most {FARTHEST_S}"),
    "eta": _TIME,
    "countdown": (
        lambda value: is_number(value, -FARTHEST_S, FARTHEST_S),
        f"must be at most {FARTHEST_S} s",
    ),
    "priority": (lambda value: is_int(value, -LARGEST_INT), "must be a whole number"),
    "time_limit": (is_limit, f"must be {_LIMIT}"),
    "soft_time_limit": (is_limit, f"must be {_LIMIT}"),
    "compression": COMPRESSION.rule,
    "shadow": _TEXT,
    "reply_to": _TEXT,
    "headers": (lambda value: isinstance(value, Mapping), "must be an object"),
}


def check_submission(options: Mapping[str, Any], accepted: Any) -> None:
    """Raise `InvalidRequest` for the first of Celery's `options` that no worker would take. `accepted`: the app's
    `accept_content`."""
    for name, value in options.items():
        if value is not None and (rule := _OPTIONS.get(name)) is not None and not rule[0](value):
            raise InvalidRequest(name, rule[1], value)
    if given := options.get("headers"):
        _check_headers(dict(given))
    serializer = options.get("serializer")
    if serializer is not None:
        kind = registry.name_to_type.get(serializer) if isinstance(serializer, str) else None
        if kind not in prepare_accept_content(accepted):  # type: ignore[no-untyped-call]
            raise InvalidRequest("serializer", f"must be one of {', '.join(sorted(accepted))}", serializer)


def _check_headers(headers: Mapping[str, Any]) -> None:
    for name, value in headers.items():
        if not encodes(name):
            raise InvalidRequest("headers", "must have names of text that UTF-8 can encode", repr(name))
        if name in RESERVED or name in SET_BY_CELERY:
            raise InvalidRequest(f"headers.{name}", "must have another name: this one is Celery's own", value)
        if name not in SHOWN and (limit := wrong_text(value)):
            raise InvalidRequest(f"headers.{name}", limit, value)
    if wrong := first_wrong(headers, KNOWN | OWN):
        name, must = wrong
        raise InvalidRequest(f"headers.{name}", must, headers[name])
    if limit := wrong_text(headers):
        raise InvalidRequest("headers", limit, f"{len(headers)} headers")


@dataclass(frozen=True, slots=True)
class Account:
    """The tenant that a task belongs to, and the model that it runs on. `days`: how long its entry is kept."""

    tenant: str = ""
    held: tuple[str, int, int, int] | None = None
    model: str = ""
    adapter: str = ""
    days: int = 7

    @classmethod
    def of(cls, message: Mapping[str, Any], **known: Any) -> Account:
        """`message`: the headers."""
        held = HELD.of(message)
        return cls(
            TENANT.of(message) or "", None if held is None else (held[0], held[1], held[2], held[3]), **known
        )
