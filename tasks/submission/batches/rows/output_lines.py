"""A row's result: from how its task has ended to the line that the output has of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.batches.rows.frames import is_missing
from petiole.tasks.submission.batches.rows.sources import Row

NOT_SHOWN = ("attempt", "timing", "token_ids")
"""Fields of results that lines have only where they are asked for: two runs do not agree in them, or they double
the size."""
HEAD = ("row", "id", "error")
"""What lines have beside the fields of results."""
_SHOWN = 500


class RowResult(NamedTuple):
    """How a row has ended. `line`: as in the output."""

    row: int
    good: bool
    line: Mapping[str, Any]


class TaskOutcome(NamedTuple):
    """How a task has ended: with a result, or with an error as `errors.describe` gives it."""

    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def usage(self) -> Mapping[str, int]:
        return (self.result or {}).get("usage") or {}


class OutputLine(NamedTuple):
    """How a row has ended. `value`: one JSON object. `why`: what is wrong, without the row's own values: rows that
    fail alike have the same. Empty: unknown."""

    good: bool
    value: dict[str, Any]
    why: str = ""

    @property
    def json(self) -> bytes:
        """Without a line feed. What JSON does not know, such as a date in an `id`, is text."""
        return json.dumps(self.value, ensure_ascii=False, default=str).encode(errors="replace")

    def failure(self, row: Row) -> str:
        """What a terminal shows of a row that has failed."""
        error = self.value.get("error")
        said = error.get("message") if isinstance(error, dict) else self.json.decode()
        letters = (letter if letter.isprintable() else " " for letter in str(said)[:_SHOWN])
        return f"row {row.number}: {''.join(letters)}"


def line_of(row: Row, outcomes: Sequence[TaskOutcome], fields: Sequence[str] | None = None) -> OutputLine:
    """The line of a row that became one task. `fields`: of the result; None: all but `NOT_SHOWN`."""
    (outcome,) = outcomes
    if outcome.error is not None:
        return failed_line(row, outcome.error)
    result = outcome.result or {}
    chosen = fields or [name for name in result if name not in NOT_SHOWN]
    return OutputLine(True, {**_head(row), **{name: result.get(name) for name in chosen if name not in HEAD}})


def failed_line(row: Row, error: Mapping[str, Any]) -> OutputLine:
    """`error`: as `errors.describe` gives it."""
    shown = {"type": error.get("type"), "message": error.get("message")}
    return OutputLine(False, {**_head(row), "error": shown}, _why(error))


def _head(row: Row) -> dict[str, Any]:
    head: dict[str, Any] = {"row": row.number}
    try:
        value = row.value()
    except InvalidRequest:
        return head
    if "id" not in value:
        return head
    return {**head, "id": None if is_missing(value["id"]) else value["id"]}


def _why(error: Mapping[str, Any]) -> str:
    match error:
        case {"type": "InvalidRequest", "args": [str(field), str(limit), _]}:
            return f"{field}: {limit}"
    return str(error.get("message"))
