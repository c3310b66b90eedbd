"""Bodies of HTTP requests that are nearly right: every parameter of every route, drawn from the type that the
route's handler reads, with names and words below it that the gateway's code looks for.

All follow from a seed. A route that reads a body is among them on the day on which it is added."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import random
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from starlette.routing import Mount, Route

from petiole.contract.requests.bounds import Bounded, Entries
from petiole.gateway.http import application
from tests.support import reading
from tests.support.parsing import parsed

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, "", "x", "\x00", "\ud800",
    "\u2028\x1b[2J", "😀" * 50, [], [[]], [None], {}, {"type": "text"}, {"type": 3},
    {"a": {"b": [1, {"c": None}]}}, "9" * 400, [1, "a", None], "a" * 10_000, {"": {}}, [{}], [[[]] * 3] * 3,
    10**400,
)  # fmt: skip
TEXTS = (
    "",
    "x",
    "Count from 1 to 5.",
    "é" * 300,
    "\x00\x1b[31m",
    "data:image/png;base64,AAAA",
    "http://127.0.0.1:9/",
)
MOST_BYTES = 2**27
"""Of a list or a map, as JSON: twice what a gateway takes."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@cache
def kinds() -> Mapping[str, type[Bounded]]:
    """By path, the type of the body that its handler reads."""

    def walk(before: str, routes: Any) -> Iterator[tuple[str, type[Bounded]]]:
        for route in routes:
            if isinstance(route, Mount):
                yield from walk(before + route.path, route.routes)
            elif isinstance(route, Route) and (kind := _read(route.endpoint)) is not None:
                yield before + route.path, kind

    return dict(walk("", application.make().routes))


def _read(handler: Any) -> type[Bounded] | None:
    """The type in `request_body.read(request, TYPE)`."""
    for node in ast.walk(parsed(textwrap.dedent(inspect.getsource(handler)))):
        match node:
            case ast.Call(func=ast.Attribute(attr="read"), args=[_, ast.Name(id=name)]):
                found: type[Bounded] = inspect.unwrap(handler).__globals__[name]
                return found
    return None


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value, with a key of it."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


class Bodies:
    """An endless supply. `examples`: by path, a body that is right."""

    def __init__(self, seed: int, examples: Mapping[str, dict[str, Any]]) -> None:
        assert examples.keys() == kinds().keys(), "a route without an example, or the other way round"
        self.random, self._examples = random.Random(seed), examples
        self._paths = sorted(examples)

    def next(self) -> tuple[str, bytes]:
        """A path and a body."""
        choose = self.random
        path = choose.choice(self._paths)
        body, kind = copy.deepcopy(self._examples[path]), kinds()[path]
        required = {name for name, field in kind.model_fields.items() if field.is_required()}
        for name in [*body]:
            if name not in required and name not in LIMITS and choose.random() < 0.5:
                del body[name]
        apart = (*sorted({*getattr(kind, "REFUSED", ()), *getattr(kind, "IGNORED", ())}), "no_parameter")
        for _ in range(choose.choice((0, 1, 1, 2))):
            name = choose.choice((*kind.model_fields, *kind.model_fields, *apart))
            if name in LIMITS:
                body[name] = choose.choice((0, 1, 3, -1, 2**40, "3"))
            else:
                field = kind.model_fields.get(name)
                body[name] = self.any() if field is None else self._drawn(field.annotation, field.metadata)
        for _ in range(choose.choice((0, 0, 0, 1, 2))):
            self._change(body)
        return path, self._written(body)

    def any(self, levels: int = 3) -> Any:
        """A value of any type, with the names and words of the code."""
        choose = self.random
        match choose.randrange(8 if levels else 4):
            case 0 | 1:
                return copy.deepcopy(choose.choice(VALUES))
            case 2:
                return choose.choice(reading.words_of_bodies())
            case 3:
                return choose.choice(TEXTS)
            case 4 | 5 | 6:
                names = choose.choices(reading.names_of_bodies(), k=choose.choice((1, 2, 3, 6)))
                made = {name: self.any(levels - 1) for name in names}
                return (
                    {**made, "type": choose.choice(reading.words_of_bodies())} if choose.random() < 0.5 else made
                )
        return [self.any(levels - 1) for _ in range(choose.choice((0, 1, 2, 5)))]

    def _drawn(self, kind: Any, metadata: Any, most_entries: int = 70_000) -> Any:
        """Mostly of the type, at a limit now and then. Of lists in a list, one at most is long."""
        choose, most = self.random, dict(_limits(metadata))
        if choose.random() < 0.2:
            return self.any()
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._drawn(inner[0], (*inner[1:], *metadata), most_entries)
        if origin in (Union, UnionType):
            return self._drawn(choose.choice(inner), metadata, most_entries)
        if origin is Literal:
            return choose.choice(inner)
        if origin in (list, dict):
            at_limit = most.get("most", 1000) + choose.choice((-1, 0, 1))
            count = min(choose.choice((0, 1, 1, 2, 5, 5, 40, at_limit)), most_entries)
            one = self._drawn(inner[-1], (), 2) if count > 5 else None
            if one is not None:
                count = min(count, max(1, MOST_BYTES // len(json.dumps(one))))
            entries = [self._drawn(inner[-1], (), most_entries) if one is None else one for _ in range(count)]
            return (
                entries if origin is list else {f"{self._name()}{k or ''}": one for k, one in enumerate(entries)}
            )
        if kind in (int, float):
            near = [edge + by for edge in most.values() if edge is not None for by in (-1, 0, 1)]
            return choose.choice((*near, 0, 1, 2, 0.5, -1, 7, 2**31, 2**64, 1e300))
        if kind is bool:
            return choose.random() < 0.5
        if kind is str:
            return choose.choice((*TEXTS, *reading.words_of_bodies()[:20], "x" * (most.get("most") or 3)))
        return None if kind is NoneType else self.any()

    def _name(self) -> str:
        return self.random.choice((*reading.names_of_bodies(), "5", "a", ""))

    def _change(self, body: Any) -> None:
        """Leave something out, replace it, or add to it, anywhere."""
        choose = self.random
        if not (there := [place for place in places(body) if place[1] not in LIMITS]):
            return
        container, key = choose.choice(there)
        match choose.randrange(4):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[self._name()] = self.any()
            case 2 if isinstance(container, list):
                container.insert(key, self.any())
            case _:
                container[key] = self.any()

    def _written(self, body: dict[str, Any]) -> bytes:
        choose, mark = self.random, "the place of a large value"
        chance = choose.random()
        if chance < 0.015 and (there := places(body)):
            container, key = choose.choice(there)
            container[key] = mark
            return json.dumps(body).encode().replace(json.dumps(mark).encode(), self._large(), 1)
        text = json.dumps(body).encode()
        if chance < 0.1:
            at = choose.randrange(len(text))
            return text[:at] + bytes([choose.randrange(256)]) + text[at + choose.choice([0, 1, 5, len(text)]) :]
        return text

    def _large(self) -> bytes:
        """JSON text of a megabyte or more."""
        levels = self.random.choice((190, 1000, 100_000))
        return self.random.choice(
            (
                lambda: b"[" + b"1," * 500_000 + b"1]",
                lambda: b"[" + b"[]," * 2**20 + b"1]",
                lambda: b"{" + b"".join(b'"k%d":1,' % k for k in range(100_000)) + b'"k":1}',
                lambda: b'"' + b"a" * 3_000_000 + b'"',
                lambda: b'"' + b"\\ud83d\\ude00" * 200_000 + b'"',
                lambda: b"[" * levels + b"]" * levels,
                lambda: b'{"a":' * levels + b"1" + b"}" * levels,
                lambda: b"9" * 1_000_000,
            )
        )()


def _limits(metadata: Any) -> Iterator[tuple[str, int]]:
    for one in metadata:
        if isinstance(one, Entries):
            yield "most", one.most
        for name in ("ge", "gt", "le", "lt"):
            if isinstance(edge := getattr(one, name, None), int | float):
                yield name, edge  # type: ignore[misc]
        if (most := getattr(one, "max_length", None)) is not None:
            yield "most", most
