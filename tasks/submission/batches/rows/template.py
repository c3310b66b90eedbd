"""A prompt with columns: `Summarize: {text}`. Braces that mean braces are doubled."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from petiole.tasks.errors import InvalidRequest, shorten


class Template:
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

    def fill(self, row: Mapping[str, Any]) -> str:
        """Raises `InvalidRequest` for a column that the row lacks, or that has no text."""
        filled = []
        for before, name in self._parts:
            filled.append(before)
            if name is None:
                continue
            if name not in row:
                raise InvalidRequest(
                    name, f"must be a column of the row, which has {shorten(list(row))}", "nothing"
                )
            value = row[name]
            if value is None or isinstance(value, dict | list):
                raise InvalidRequest(name, "must be text or a number", shorten(value))
            filled.append(value if isinstance(value, str) else str(value))
        return "".join(filled)
