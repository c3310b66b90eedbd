"""Text, numbers and data from a request, checked before anything is computed from them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import NoneType
from typing import Any, NamedTuple, Self, get_args

from annotated_types import Ge, Gt, Le, Lt

from petiole.gpu_worker.errors import InvalidRequest, require

MAX_DEPTH = 64

_KINDS = {bool: "true or false", int: "a whole number", float: "a finite number"}
_BOUNDS = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


class Bound(NamedTuple):
    holds: Callable[[Any, Any], bool]
    words: str
    limit: float


@dataclass(frozen=True, slots=True)
class Scalar:
    """The values that a type of `petiole.limits`, or a plain `bool`, `int` or `float`, allows."""

    kind: type
    bounds: tuple[Bound, ...] = ()
    optional: bool = False

    @classmethod
    def of(cls, hint: Any) -> Self | None:
        """The scalar of a type hint; None if the hint is a list, a mapping or text."""
        parts = get_args(hint) if NoneType in get_args(hint) else (hint,)
        kind, *limits = get_args(parts[0]) if hasattr(parts[0], "__metadata__") else (parts[0],)
        bounds = (Bound(*_BOUNDS[type(limit)], *astuple(limit)) for limit in limits)
        return cls(kind, tuple(bounds), len(parts) > 1) if kind in _KINDS else None

    def check(self, field: str, value: object) -> None:
        """Raises InvalidRequest."""
        if value is None and self.optional:
            return
        require(self._is_kind(value), field, f"must be {_KINDS[self.kind]}", value)
        if not all(bound.holds(value, bound.limit) for bound in self.bounds):
            words = " and ".join(f"{bound.words} {bound.limit}" for bound in self.bounds)
            raise InvalidRequest(field, f"must be {words}", value)

    def _is_kind(self, value: Any) -> bool:
        if isinstance(value, bool) or self.kind is bool:
            return isinstance(value, bool) and self.kind is bool
        if self.kind is int:
            return isinstance(value, int)
        return isinstance(value, int | float) and -math.inf < value < math.inf  # an int may be beyond all floats


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
