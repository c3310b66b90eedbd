"""The JSON files of a model's folder."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petiole.gpu_worker.exceptions import ModelError

JsonObject = Mapping[str, Any]

MAX_VOCAB = 2**24
"""A limit far above every model."""
MAX_BYTES = 2**27
"""Of a file of text: tokenizer.json may have 40 MB."""


def read_json(path: Path) -> dict[str, Any]:
    loaded = _loaded(path)
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return loaded


def read_list(path: Path) -> list[dict[str, Any]]:
    """A file with a list of objects."""
    loaded = _loaded(path)
    if not isinstance(loaded, list) or not all(isinstance(one, dict) for one in loaded):
        raise ModelError(f"{path} must hold a list of JSON objects")
    return loaded


def read_text(path: Path) -> str:
    """A file of text. Raises ModelError."""
    check_file(path, MAX_BYTES)
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


def _loaded(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deep") from None


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
