"""Every type of pydantic's: its schema is served, and what a random walk makes of it, the type reads."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import inspect
import ipaddress
import pathlib
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from petiole.gpu_worker.constraints.schema import string_formats
from tests.gpu_worker.constraints.walking import compiled, draw


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Pair(NamedTuple):
    x: int
    y: str = "a"


class Entry(TypedDict, total=False):
    x: int
    y: bool


@dataclasses.dataclass
class Point:
    x: Annotated[float, Field(ge=0, lt=1)]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(le=9, ge=0)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Tree(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: Colour
    children: Annotated[list[Tree], Field(max_length=2)] = []


PRICE = Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)]
KEYED = dict[Annotated[str, Field(pattern="^[a-z]{2}$")], int]
STANDARD: list[Any] = [
    *(int, float, str, bool, None, bytes, decimal.Decimal, fractions.Fraction, Any),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID, re.Pattern, pathlib.Path),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface, Colour, Level, Pair, Entry, Point, Tree),
    *(list[int], set[int], set[Colour], frozenset[str], tuple[int, str], tuple[int, ...], collections.deque[int]),
    *(dict[str, int], dict[Colour, int], dict[int, str], dict[uuid.UUID, int], dict[datetime.date, bool]),
    *(
        collections.defaultdict[str, list[int]],
        collections.OrderedDict[str, int],
        Mapping[str, int],
        Sequence[int],
    ),
    KEYED,
    dict[Annotated[str, Field(min_length=2, max_length=3)], int],
    *(Literal["a", 1, None, True], int | str, Colour | None),
    Annotated[Cat | Dog, Field(discriminator="kind")],
    PRICE,
    Annotated[float, Field(gt=0, lt=0.75)],
    Annotated[int, Field(multiple_of=5, ge=-20, le=20)],
]
NOT_READ = {
    *("FilePath", "DirectoryPath", "NewPath", "SocketPath"),  # it must exist, or must not
    *("PastDate", "PastDatetime", "FutureDate", "FutureDatetime", "NaiveDatetime"),  # the schema does not say so
    *("Json", "ImportString", "PaymentCardNumber", "EncodedStr", "EncodedBytes", "ByteSize"),
    *("HttpUrl", "FileUrl", "FtpUrl", "WebsocketUrl", "AnyHttpUrl", "AnyWebsocketUrl"),  # the scheme
    *("AnyUrl", "Base64Str", "Base64UrlStr"),  # bytes that are text, hosts that are names
}
"""Types of pydantic's that ask for more than their schema says."""

UNSAID: list[Any] = [re.Pattern, decimal.Decimal, PRICE, dict[int, str], KEYED]
"""Others: which expressions are good, which text is a number, and that no other key is allowed."""


def _public() -> list[Any]:
    """The types that pydantic itself exports, if they have a schema."""
    found = []
    for name in pydantic.__all__:
        if name.endswith(("Dsn", "Error", "Warning")) or name in {
            "BaseModel",
            "RootModel",
            "EmailStr",
            "NameEmail",
        }:
            continue
        kind = getattr(pydantic, name, None)
        try:
            schema = TypeAdapter(kind).json_schema()
        except Exception:
            continue
        if schema and (inspect.isclass(kind) or hasattr(kind, "__metadata__")):
            found.append(pytest.param(kind, id=name))
    return found


PUBLIC = _public()


def read(kind: Any, schema: dict[str, Any], seed: int, reads: bool) -> None:
    text = draw(compiled("json_schema", schema), random.Random(seed))
    if reads:
        TypeAdapter(kind).validate_json(text)


@pytest.mark.parametrize("kind", STANDARD, ids=str)
def test_a_standard_type_is_served_and_read(kind: Any) -> None:
    for seed in range(5):
        read(kind, TypeAdapter(kind).json_schema(), seed, kind not in UNSAID)


@pytest.mark.parametrize("kind", PUBLIC)
def test_a_type_of_pydantics_is_served(kind: Any, request: pytest.FixtureRequest) -> None:
    for seed in range(3):
        read(kind, TypeAdapter(kind).json_schema(), seed, request.node.callspec.id not in NOT_READ)


def test_the_walk_is_over_most_types() -> None:
    assert len(PUBLIC) > 35


@pytest.mark.parametrize("kind", sorted(string_formats.expressions().keys() | string_formats.UNENFORCED))
def test_a_format_is_served(kind: str) -> None:
    assert draw(compiled("json_schema", {"type": "string", "format": kind}), random.Random(3))


def test_the_decimals_of_older_pydantic_are_served() -> None:
    """Their pattern begins with a look-ahead."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d{0,3}\.?\d{0,2}0*$"
    for seed in range(20):
        text = draw(compiled("json_schema", {"type": "string", "pattern": pattern}), random.Random(seed))
        assert re.search(pattern, text[1:-1])
