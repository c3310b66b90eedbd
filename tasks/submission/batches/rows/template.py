"""A prompt with columns: `Summarize: {text}`. Braces that mean braces are doubled."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from petiole.contract.errors import shorten
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.batches.rows.frames import is_missing


class RowTemplate:
    def __init__(self, text: str) -> None:
        """Raises `InvalidRequest`."""
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidRequest("prompt", f"must have columns in braces, as {{text}} ({error})", text) from None
        for _, name, form, conversion in parts:
            if name is not None and (not name or form or conversion):
                raise InvalidRequest("prompt", "must name a column in each pair of braces, as {text}", text)
        self._parts = [(before, name) for before, name, _, _ in parts]

    @property
    def columns(self) -> list[str]:
        return [name for _, name in self._parts if name is not None]

    def fill(self, row: Mapping[str, Any]) -> str:
        """Raises `InvalidRequest` for a column that the row lacks, or that has no text."""
        filled = []
        for before, name in self._parts:
            filled.append(before)
            if name is None:
                continue
            value = column(row, name)
            if isinstance(value, dict | list | bytes | bytearray | memoryview):
                raise InvalidRequest(name, "must be text or a number", shorten(value))
            filled.append(value if isinstance(value, str) else str(value))
        return "".join(filled)


def column(row: Mapping[str, Any], name: str) -> Any:
    """Raises `InvalidRequest` for a column that the row lacks, and where it has a hole."""
    if name not in row:
        raise InvalidRequest(name, "must be a column of the row", f"the columns {shorten(list(row))}")
    value = row[name]
    if value is None or is_missing(value):
        raise InvalidRequest(name, "must have a value", shorten(value))
    return value
