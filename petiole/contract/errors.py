"""The errors of a request, for every floor: a producer raises them at once, a worker stores them as a task's end.

The errors of each floor alone are declared there: `petiole.tasks.errors`, `petiole.gpu_worker.exceptions`."""

from __future__ import annotations

_SHOWN = 200
_LONGEST_LIMIT = 600
"""Characters. A library's reason may quote all that it read."""


class PetioleError(Exception):
    """Base class of the errors that a caller of a task may get."""


class InvalidRequest(PetioleError, ValueError):  # noqa: N818 - the name that users see in a task's result
    """The request is invalid. It is not retried.

    `field` is the request's field, `limit` the constraint on it, `value` the given value (shortened).
    """

    def __init__(self, field: str, limit: str, value: object) -> None:
        shown = value if isinstance(value, str) and len(value) <= 2 * _SHOWN else shorten(value)
        shown = shown.encode(errors="backslashreplace").decode()  # pydantic does not accept lone surrogates
        limit = limit if len(limit) <= _LONGEST_LIMIT else f"{limit[:_LONGEST_LIMIT]}…"
        super().__init__(field, limit, shown)
        self.field, self.limit, self.value = field, limit, shown

    def __str__(self) -> str:
        return f"{self.field}: {self.limit}, got {self.value}"


def require(condition: bool, field: str, limit: str, value: object) -> None:
    """Raises InvalidRequest unless `condition` is true."""
    if not condition:
        raise InvalidRequest(field, limit, value)


def shorten(value: object) -> str:
    """`repr(value)`, truncated to fit into an error message."""
    try:
        if isinstance(value, str | bytes | list | tuple) and len(value) > _SHOWN:
            return f"{repr(value[:_SHOWN])[:_SHOWN]}… ({len(value)} in all)"
        shown = repr(value)
    except RecursionError:
        return "something deeply nested"
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(shown)} characters)"
