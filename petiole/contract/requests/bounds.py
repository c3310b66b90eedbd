"""What a request may cost before it is understood.

pydantic makes an error of a kilobyte for each wrong entry and for each unknown name: without bounds 2 MB of JSON
took a gigabyte. So

1. JSON text has at most `MOST_VALUES` lists, objects, commas and colons, counted before the text is parsed:
   `too_many_in`;
2. each list and map of a request has a largest length, checked before its entries, and of its wrong entries the
   first one is reported: `Entries`;
3. a request has at most `MOST_VALUES_OF_A_REQUEST` of them, counted before it is sent: `check_values`;
4. of a request's unknown names the first one is reported: `Bounded`, the base of all models of requests.
"""

from __future__ import annotations

import marshal
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from petiole.contract.errors import InvalidRequest

MOST_VALUES = 2**19
"""Maximum number of lists, objects, commas and colons in JSON text. A byte or two of it may take two hundred bytes
of memory: so much as a list in it, or as a name with its value."""

MOST_VALUES_OF_A_REQUEST = MOST_VALUES - 4096
"""The same for a request: its message has some more around it."""

MOST_NAMES = 1024
"""Maximum number of names of an object that a request has in it, such as a message or a schema."""


_PLAIN: dict[Any, Any] = {list: list, Sequence: list, dict: dict, Mapping: dict}
_MAPS = (dict, Mapping)
_COUNTED = (list, tuple, *_MAPS)


def values_in(text: bytes | bytearray | str) -> tuple[int, int]:
    """How many lists and objects JSON text has at most, and how many of these, commas and colons."""
    if isinstance(text, str):
        nested, between = text.count("[") + text.count("{"), text.count(",") + text.count(":")
    else:
        nested, between = text.count(b"[") + text.count(b"{"), text.count(b",") + text.count(b":")
    return nested, nested + between


def too_many_in(text: bytes | bytearray | str) -> int:
    """How many values JSON text has, if these are more than `MOST_VALUES`, and otherwise 0. Short text is not
    counted: it cannot have so many."""
    if len(text) <= MOST_VALUES:
        return 0
    values = values_in(text)[1]
    return values if values > MOST_VALUES else 0


def check_values(options: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest`, which names the option with the most of them, if the JSON text of a request
    has more lists, objects, commas and colons than a worker takes."""
    if _marshalled(options) <= MOST_VALUES_OF_A_REQUEST:
        return
    counts = {name: _values_of(value) for name, value in options.items()}
    if (values := 3 * len(counts) + sum(counts.values())) > MOST_VALUES_OF_A_REQUEST:
        limit = f"with the rest must have at most {MOST_VALUES_OF_A_REQUEST} lists, objects, commas and colons"
        raise InvalidRequest(max(counts, key=lambda name: counts[name]), limit, values)


def _marshalled(options: Mapping[str, Any]) -> float:
    """How many bytes Python's own format takes, which is at least as many as the text has values: each entry and
    each character takes one or more. Of an ordinary request this costs a microsecond, where counting costs 15."""
    try:
        return len(marshal.dumps(dict(options), 2))  # version 3 writes an object once, however often it is there
    except ValueError:  # nested too deeply, or a value that is not Python's own
        return math.inf


def _values_of(value: Any) -> int:
    """`values_in` of a value's JSON text, or a little more."""
    values, open_ones = 0, [value]
    while open_ones:
        match open_ones.pop():
            case str(text):
                values += values_in(text)[1]
            case dict() as found:
                values += 1 + 2 * len(found)
                open_ones += (*found, *found.values())
            case list() | tuple() as found:
                values += 1 + len(found)
                open_ones += (one for one in found if type(one) is not int)
    return values


@dataclass(frozen=True)
class Entries:
    """In the type of a list or a map, last: how many entries it has. A sequence must be a list or a tuple, a
    mapping a dict."""

    most: int
    least: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        whole: CoreSchema = handler(_PLAIN[get_origin(source)][get_args(source)])
        counted: Any = whole
        while counted["type"] == "function-before":
            counted = counted["schema"]
        if counted["type"] not in ("list", "dict"):
            raise TypeError(f"Entries: must be of a list or a map, got {counted['type']}")
        counted |= {"max_length": self.most, "fail_fast": True}
        if self.least:
            counted["min_length"] = self.least
        itself: bool = counted is whole
        if itself and counted.get("values_schema", {}).get("type") == "any":
            return whole  # no entry of JSON can be wrong, so counting afterwards costs no errors
        return core_schema.no_info_before_validator_function(self.check, whole)

    def check(self, value: Any) -> Any:
        if isinstance(value, _COUNTED) and len(value) > self.most:
            kind = "Dictionary" if isinstance(value, Mapping) else "List"
            found = {"field_type": kind, "max_length": self.most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", found)
        return list(value) if isinstance(value, tuple) else value


Object = Annotated[dict[str, Any], Entries(MOST_NAMES)]


class Bounded(BaseModel):
    """Base of the models of requests."""

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_name(cls, given: Any) -> Any:
        known = cls.model_fields
        if not isinstance(given, _MAPS) or len(given) <= len(known):
            return given
        unknown = next(name for name in given if name not in known)
        return {unknown: given[unknown], **{name: given[name] for name in known if name in given}}
