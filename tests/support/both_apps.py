"""Chains, groups and chords of two apps in one process, in every order, and what each must give.

Runs as a program, beside a worker of each app, and prints as JSON how many canvases it has tried and what went
wrong. It imports what a producer has, no more.

    python both_apps.py threads THREADS EVERY            every EVERY-th canvas, so many at once
    python both_apps.py forked CHILDREN THREADS EVERY    the same in each of so many processes
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import chain, chord, group

from petiole.tasks import generate
from tests.support.shop import note

PATIENCE_S = 60

Shape = Any
"""A task, or a tuple of a name and its members. A task is "?" until it is Petiole's, "P3", or the shop's, "S3"."""

SHAPES: tuple[Shape, ...] = (
    "?",
    ("chain", "?", "?", "?"),
    ("group", "?", "?"),
    ("group", "?", ("chain", "?", "?")),
    ("group", "?", ("group", "?", "?")),
    ("chain", "?", ("group", "?", "?")),
    ("chain", ("group", "?", "?"), "?"),
    ("chain", "?", ("group", "?", "?"), "?"),
    ("chain", ("group", "?", "?"), "?", "?"),
    ("chain", ("group", ("chain", "?", "?"), "?"), "?"),
    ("chain", ("group", "?", "?"), ("group", "?", "?")),
    ("chain", "?", ("group", "?", "?"), "?", ("group", "?", "?")),
    ("chord", "?", "?", "?"),
    ("chord", "?", "?", ("chain", "?", "?")),
    ("chord", "?", "?", ("group", "?", "?")),
    ("chord", "?", ("chord", "?", "?", "?"), "?"),
    ("chord", "?", "?", ("chord", "?", "?", "?")),
    ("group", "?", ("chord", "?", "?", "?")),
)


def leaves(shape: Shape) -> int:
    return 1 if isinstance(shape, str) else sum(map(leaves, shape[1:]))


def filled(shape: Shape, apps: Iterator[tuple[int, str]]) -> Shape:
    """`shape`, its tasks numbered and given to apps."""
    if isinstance(shape, str):
        number, app = next(apps)
        return f"{app}{number}"
    return (shape[0], *(filled(member, apps) for member in shape[1:]))


def canvases() -> Iterator[Shape]:
    for shape in SHAPES:
        for apps in itertools.product("PS", repeat=leaves(shape)):
            yield filled(shape, iter(enumerate(apps)))


def built(shape: Shape) -> Any:
    if isinstance(shape, str):
        number = int(shape[1:])
        if shape[0] == "P":
            return generate.s(prompt=f"{number}:", max_tokens=1, seed=1)
        return note.s(label=number)
    kind, *members = shape
    signatures = [built(member) for member in members]
    if kind == "chord":
        return chord(signatures[:-1], signatures[-1])
    return {"chain": chain, "group": group}[kind](*signatures)


def generated(prompt: str) -> str:
    """The one token of the fake engine."""
    return f"w{zlib.crc32(f'{prompt!r}|1|0'.encode()) % 50_000} "


def value(shape: Shape, given: Any = "") -> Any:
    """What a canvas gives: texts, and lists of them."""
    if isinstance(shape, str):
        given = given if isinstance(given, list) else [given]
        if shape[0] == "P":
            return generated(f"{shape[1:]}:" + "\n".join(given))
        return f"{shape[1:]}<{'+'.join(given)}>"
    kind, *members = shape
    if kind == "group":
        return [
            one
            for member in members
            for one in (value(member, given) if member[0] == "group" else [value(member, given)])
        ]
    if kind == "chord":
        return value(members[-1], value(("group", *members[:-1]), given))
    for member in members:
        given = value(member, given)
    return given


def texts(result: Any) -> Any:
    if isinstance(result, list):
        return [texts(one) for one in result]
    return result["text"] if isinstance(result, dict) else result


def attempt(shape: Shape) -> str:
    try:
        got = texts(built(shape).apply_async().get(timeout=PATIENCE_S, disable_sync_subtasks=False))
    except Exception as error:
        return repr(error)
    return "" if got == value(shape) else f"{got} instead of {value(shape)}"


def outcomes(threads: int, every: int) -> dict[str, str]:
    """What went wrong with every n-th canvas. An odd number, because the last task's app changes with each."""
    shapes = list(canvases())[::every]
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(map(str, shapes), pool.map(attempt, shapes), strict=True))


def forked(children: int, *arguments: int) -> dict[str, str]:
    """What went wrong in child processes, and in their parent at the same time. The parent has used both apps
    before the fork."""
    found, readers = outcomes(1, 101), []
    for _ in range(children):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.write(writer, json.dumps(outcomes(*arguments)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(os.fdopen(reader))
    found |= outcomes(*arguments)
    for number, reader in enumerate(readers):
        found |= {f"child {number}: {name}": why for name, why in json.load(reader).items()}
    return found


if __name__ == "__main__":
    run = {"threads": outcomes, "forked": forked}[sys.argv[1]]
    result = run(*map(int, sys.argv[2:]))
    print(json.dumps({"tried": len(result), "wrong": {name: why for name, why in result.items() if why}}))
