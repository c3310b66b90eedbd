"""`python -m tests.support.overfilled DOOR`: requests with thousands of wrong entries, at a door by which they
come. Prints how many MiB each has taken at most, as JSON by its name.

    producer  `delay`, with Python's own values
    message   a message of a task, from its bytes to its request, as a worker reads it
    body      the body of an HTTP request
    line      a line of an HTTP batch

The fields are those of the models, found in them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from petiole import gateway
from petiole.contract.requests.bounds import Bounded

MANY = 1_000_000
PASSING = 20_000
"""So many pass at the doors for JSON text, which count all values before it is parsed. Their errors would take
about 20 MiB."""
CALLED = 200_000
"""Of a call of the first task, which is not counted as text. Their errors would take about 200 MiB. All values of
a call are counted before any field is looked at, so the other tasks are tried with those that pass."""


@cache
def entries(many: int) -> dict[str, Any]:
    """By their form: entries that are wrong in most lists, and in most maps."""
    return {"list": [[]] * many, "map": {f"a{number}": [] for number in range(many)}}


@cache
def text_of(many: int) -> dict[str, str]:
    return {form: json.dumps(value) for form, value in entries(many).items()}


def kinds() -> list[type[Bounded]]:
    """All models of requests that are no bases of others."""
    for found in pkgutil.walk_packages(gateway.__path__, f"{gateway.__name__}."):
        importlib.import_module(found.name)
    for name in ("requests.count", "tasks"):
        importlib.import_module(f"petiole.contract.{name}")
    leaves = {kind for kind in below(Bounded) if not kind.__subclasses__()}
    return sorted(leaves, key=lambda kind: (kind.__module__, kind.__name__))


def below(kind: type[Bounded]) -> Iterator[type[Bounded]]:
    for one in kind.__subclasses__():
        yield one
        yield from below(one)


def has_entries(schema: Any) -> bool:
    """Whether a value of this schema may be a list or a map."""
    if isinstance(schema, dict):
        return schema.get("type") in {"list", "dict", "any", "function-plain", "model"} or any(
            map(has_entries, schema.values())
        )
    return isinstance(schema, list) and any(map(has_entries, schema))


def fields_of(kind: type[Bounded]) -> list[str]:
    """The fields that may have entries, and a name that is none."""
    kind.model_rebuild()
    inner: Any = kind.__pydantic_core_schema__
    while inner["type"] != "model-fields":
        inner = inner["schema"]
    return [*(name for name, field in inner["fields"].items() if has_entries(field)), "unknown"]


def cases(kind: type[Bounded]) -> Iterator[tuple[str, str]]:
    """A field, and the form of what is in it. The field without a name is the request itself. What two models have
    from one base is tried once."""
    for name in fields_of(kind):
        declared = next((one for one in kind.__mro__ if name in vars(one).get("__annotations__", {})), kind)
        if (declared, name) not in _tried:
            _tried.add((declared, name))
            yield from ((name, form) for form in entries(1))
    yield "", "map"


_tried = set[tuple[type, str]]()


def texts(kind: type[Bounded], many: int) -> Iterator[tuple[str, bytes]]:
    """The cases as JSON."""
    for name, form in cases(kind):
        value = text_of(many)[form]
        yield f"{kind.__name__}.{name}: {form} of {many}", (f'{{"{name}":{value}}}' if name else value).encode()


def refused(kind: type[Bounded]) -> Iterator[tuple[str, bytes]]:
    """A text that is counted and not parsed, which is all the same for each model: of the first one."""
    if not _counted:
        _counted.append(kind)
        yield from texts(kind, MANY)


_counted: list[type[Bounded]] = []

Case = tuple[str, Callable[[], object]]


def producer() -> Iterator[Case]:
    from petiole.contract.tasks import TASKS
    from petiole.tasks.submission import definitions

    for number, known in enumerate(TASKS.values()):
        task, kind = getattr(definitions, known.name), known.request
        for field, form in cases(kind):
            value = entries(PASSING if number else CALLED)[form]
            options = {field: value} if field else value
            yield f"{kind.__name__}.{field}: {form}", partial(task.delay, retry=False, **options)


def message() -> Iterator[Case]:
    from petiole.contract.requests.count import CountRequest
    from petiole.contract.requests.validation import validate
    from petiole.contract.tasks import TASKS
    from petiole.tasks.submission.options import parse
    from petiole.tasks.worker.broker import gate
    from tests.support import hostile

    def read(raw: bytes, name: str) -> None:
        envelope = gate.envelope(raw)
        assert isinstance(envelope, gate.MessageArguments), envelope
        about = {"content_type": "application/json", "content_encoding": "utf-8", "accept": {"application/json"}}
        found = hostile.Received(envelope.payload["body"], headers=envelope.payload["headers"], **about)
        task = gate.task(found)
        if isinstance(task, gate.Task):
            assert isinstance(task.body, list)
            options: dict[str, Any] = task.body[1]
            validate(CountRequest, options) if name == "tasks.count" else parse(name, (), options)
        else:
            assert re.search("commas|at most 1024 names", task.reason), task

    kinds: dict[str, Any] = {name: task.request for name, task in TASKS.items()}
    for name, kind in {**kinds, "tasks.count": CountRequest}.items():
        for case, options in [*texts(kind, PASSING), *refused(kind)]:
            said = hostile.message("an-id", "hello")
            about = {"body": b"[[]," + options + b",{}]", "headers": {**said["headers"], "task": name}}
            yield case, partial(read, hostile.raw({**said, **about}), name)


def body() -> Iterator[Case]:
    from petiole.gateway.serving import request_body

    def read(raw: bytes, kind: type[Bounded]) -> None:
        request_body.as_request(request_body.decoded(raw), kind)

    of_http = [kind for kind in kinds() if kind.__module__.startswith(gateway.__name__)]
    for kind in of_http:
        for case, text in texts(kind, PASSING):
            yield case, partial(read, text, kind)
    for case, text in refused(of_http[0]):
        yield case, partial(read, text, of_http[0])
    yield "30 MB of []", partial(read, b'{"a":[' + b"[]," * 10_000_000 + b"[]]}", of_http[0])


def line() -> Iterator[Case]:
    from petiole.gateway.batches.kinds import KINDS
    from petiole.gateway.batches.lines import BatchLines
    from petiole.tasks.submission.batches.rows.sources import Row

    form = BatchLines()
    for url, kind in KINDS.items():
        for case, text in [*texts(kind.body, PASSING), *refused(kind.body)]:
            asked = b'{"custom_id":"a","method":"POST","url":"%b","body":%b}' % (url.encode(), text)
            yield case, partial(form.work, Row(0, asked))


def _mib(name: str) -> float:
    """Of this process's memory: `VmRSS` now, `VmHWM` the most since it was asked to forget."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) / 1024 for one in lines if one.startswith(name))


def main(door: str) -> None:
    from petiole import memory
    from petiole.gateway.core.failures import Failure
    from petiole.tasks.errors import InvalidRequest, Unavailable

    memory.DELAY_S = 3600.0  # nothing is given back in between, which the next case would be blamed for
    taken = dict[str, float]()
    for case, call in {"producer": producer, "message": message, "body": body, "line": line}[door]():
        Path("/proc/self/clear_refs").write_text("5")
        before = _mib("VmRSS")
        with suppress(InvalidRequest, Unavailable, Failure):
            call()
        taken[case] = round(_mib("VmHWM") - before, 1)
    print(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1])
