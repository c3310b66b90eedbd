"""The JSON files of a model's folder."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from petiole.gpu_worker.exceptions import ModelError

JsonObject = Mapping[str, Any]

MAX_VOCAB = 2**24
MAX_LAYERS = 10_000
MAX_WIDTH = 2**20
"""Limits far above every model."""
MAX_BYTES = 2**27
"""Bytes of a file of text: tokenizer.json may have 40 MB."""
MAX_JSON = 2**25
"""Bytes of other JSON, which takes up to twenty times as many in memory."""
MAX_DEPTH = 100
"""The most lists and objects in each other: beyond what the interpreter handles, a value cannot even be shown."""
_MAX_NAME = 255
"""Letters of a file's name."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character, or, without the other half, what no log and no hash can encode."""


def read_json(path: Path, most: int = MAX_JSON) -> dict[str, Any]:
    """most: bytes of the file."""
    loaded = _loaded(path, most)
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return loaded


def read_list(path: Path) -> list[dict[str, Any]]:
    """A file with a list of objects."""
    loaded = _loaded(path, MAX_JSON)
    if not isinstance(loaded, list) or not all(isinstance(one, dict) for one in loaded):
        raise ModelError(f"{path} must hold a list of JSON objects")
    return loaded


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """A file of text. Raises ModelError."""
    check_file(path, most)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def check_file(path: Path, most: int | None = None) -> None:
    """Raises ModelError for what is no ordinary file, since a pipe or a device has no end, and for more bytes than
    `most`."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} must be a file, got {stat.filemode(found.st_mode)}")
    if most is not None and found.st_size > most:
        raise ModelError(f"{path} must have at most {most} bytes, got {found.st_size}")


def inside(folder: Path, name: Any, what: str) -> Path:
    """A file or folder of a model's folder. what: names it, for the message. Raises ModelError for another place,
    behind which the machine's own files may be."""
    usual = isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME
    if not usual or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{what} must be inside the model's folder, got {shown(name)}")
    return Path(folder, name)


class Stored(Protocol):
    """Bytes of a file."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def check_disjoint(entries: Mapping[str, Stored]) -> None:
    """Raises ValueError if two tensors share bytes: a small file would become a large model."""
    inside = sorted((entry.start, entry.end, name) for name, entry in entries.items() if entry.end > entry.start)
    for (_, end, name), (start, _, other) in pairwise(inside):
        if start < end:
            raise ValueError(f"data_offsets of {shown(name)} and {shown(other)} overlap by {end - start} bytes")


def _loaded(path: Path, most: int) -> Any:
    text = read_text(path, most)
    try:
        return parsed(text)
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def parsed(text: str) -> Any:
    """The value of JSON. Raises ValueError for other text, and for values that cannot be shown."""
    try:
        value = json.loads(text)
    except RecursionError:
        level = [None]
    else:
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [one for outer in level for one in _inside(outer)]
    if level:
        raise ValueError(f"it must be nested at most {MAX_DEPTH} deep, and is nested too deep")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.start + 1]
            raise ValueError(f"its texts must be text that UTF-8 can encode, got {half!a}") from None
    return value


def _inside(outer: Any) -> Iterable[Any]:
    """The lists and objects in a list or object."""
    values = outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
    return (one for one in values if isinstance(one, dict | list))


def whole(raw: JsonObject, key: str, high: int, default: int | None = None, low: int = 1) -> int:
    """A whole number from `low` to `high`. Raises KeyError if the key is missing and there is no default."""
    value = raw[key] if default is None else raw.get(key, default)
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
        raise ModelError(f"config.json: {key} must be a whole number from {low} to {high}, got {shown(value)}")
    return number


def objects(raw: JsonObject, key: str) -> JsonObject:
    """An object; an empty one if the key is missing or null."""
    given = raw.get(key) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: {key} must be an object, got {shown(given)}")
    return given


def end_token_ids(folder: Path) -> frozenset[int]:
    """The EOS token ids. Merges the ids in both files, because each file may have ids that the other lacks. In
    config.json they may stand in the nested configuration of the text part."""
    found: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        raw = read_json(path) if path.exists() else {}
        text = raw.get("text_config")
        for ids in (raw.get("eos_token_id"), text.get("eos_token_id") if isinstance(text, dict) else None):
            found.update(token_ids(path, ids))
    return frozenset(found)


def token_ids(path: Path, ids: object) -> list[int]:
    """`eos_token_id` of a file. Raises ModelError for others than ids."""
    found: list[Any] = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token_id in found:
        known = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not known or not 0 <= token_id < MAX_VOCAB:
            limit = f"must be token ids from 0 to {MAX_VOCAB - 1}"
            raise ModelError(f"{path}: eos_token_id {limit}, got {shown(token_id)}")
    return found


def architecture_of(raw: JsonObject) -> str:
    names = raw.get("architectures") or ["(none named)"]
    return str(names[0] if isinstance(names, list) else names)


def shown(value: object) -> str:
    found = repr(value)
    return found if len(found) <= 100 else f"{found[:100]}…"
