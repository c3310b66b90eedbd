"""Text, numbers and data from a request, checked before anything is computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.gpu_worker.exceptions import InvalidRequest

MAX_DEPTH = 64


def check_text(field: str, text: object) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(text, str):
        raise InvalidRequest(field, "must be a string", type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        value = f"{text[error.start]!a} at position {error.start}"
        raise InvalidRequest(field, "must be valid Unicode text", value) from error
    return str(text)


def check_token_ids(field: str, token_ids: object, vocab_size: int) -> list[int]:
    """A list of token ids below `vocab_size`."""
    if isinstance(token_ids, str | bytes | Mapping) or not hasattr(token_ids, "__iter__"):
        raise InvalidRequest(field, "must be a list of token ids", type(token_ids).__name__)
    ids = list(token_ids)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    for k, token_id in enumerate(ids):
        if not is_token_id(token_id, vocab_size):
            raise InvalidRequest(f"{field}[{k}]", f"must be a token id from 0 to {vocab_size - 1}", repr(token_id))
    return [int(token_id) for token_id in ids]


def is_token_id(value: Any, vocab_size: int) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and 0 <= value < vocab_size


def plain_data(field: str, value: object, depth: int = 0) -> Any:
    """A copy made of JSON's own types, with checked strings. Raises InvalidRequest with the path of anything
    else."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return check_text(field, value)
    if depth >= MAX_DEPTH:
        raise InvalidRequest(field, f"must be nested at most {MAX_DEPTH} deep", "deeper")
    if isinstance(value, Mapping):
        return {
            check_text(f"{field} (a key)", key): plain_data(f"{field}.{key}", item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_data(f"{field}[{k}]", item, depth + 1) for k, item in enumerate(value)]
    raise InvalidRequest(field, "must be JSON data", type(value).__name__)
