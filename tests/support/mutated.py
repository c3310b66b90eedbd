"""Files that a stranger has changed: one value of a valid one becomes huge, negative, of another type, or goes."""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.parsing import parsed

Place = tuple[str | int, ...]


def _nested(depth: int) -> list[Any]:
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


_GONE = "(gone)"
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 10**9, 10**12, 10**400, 0.5, float("nan"), float("-inf"), 1e308),
    *("", "x", "1", "a" * 100_000, "\ud800", "../../etc/passwd", "/dev/zero", "a\0b", "\n\x1b[31m"),
    *([], {}, [[]], [1], ["x"], {"a": 1}, {"0": []}, _nested(90), list(range(100_000)), _GONE),
)


def read_by(folder: Path) -> list[str]:
    """Every text in the source of a folder that may be a key of a file."""
    trees = (parsed(path.read_text()) for path in sorted(folder.rglob("*.py")))
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({text for text in texts if isinstance(text, str) and text.replace(".", "").isidentifier()})


def _places(value: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*at, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1} & {*range(len(value))}):
            yield from _places(value[i], (*at, i))


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def mutated(given: Any, draw: random.Random, keys: Sequence[str] = ()) -> Any:
    """A copy with one to three values changed, of its own or of these keys."""
    changed = copy.deepcopy(given)
    for _ in range(draw.choice((1, 1, 2, 3))):
        *outer, key = draw.choice([*_places(changed)][1:] or [("",)])
        if keys and draw.random() < 0.4:
            objects = [place for place in _places(changed) if isinstance(_at(changed, place), dict)]
            outer, key = [*draw.choice(objects or [()])], draw.choice(keys)
        holder, value = _at(changed, tuple(outer)), copy.deepcopy(draw.choice(VALUES))
        if isinstance(holder, dict):
            holder[key] = value
            if value == _GONE:
                del holder[key]
        elif isinstance(holder, list) and value != _GONE:
            holder[int(key)] = value
    return changed


def with_json(path: Path, change: Callable[[Any], Any]) -> None:
    """The file with its value changed."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def with_header(path: Path, change: Callable[[Any], Any]) -> None:
    """A file of safetensors with its header changed."""
    raw = path.read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    text = json.dumps(change(json.loads(raw[8:data]))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[data:])
