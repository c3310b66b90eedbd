"""What a batch says while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass
class Progress:
    """How far a batch is. `rows`: how many there are, if that is known. `ended`: with those of earlier runs, and
    `before`: those alone. `note`: why nothing goes on."""

    rows: int | None = None
    ended: int = 0
    failed: int = 0
    before: int = 0
    on_their_way: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    rows_per_s: float = 0.0
    seconds: float = 0.0
    note: str = ""

    @property
    def remaining_s(self) -> float | None:
        if self.rows is None or not self.rows_per_s:
            return None
        return max(self.rows - self.ended, 0) / self.rows_per_s


class RowResult(NamedTuple):
    """How a row has ended. `line`: as in the output."""

    row: int
    good: bool
    line: Mapping[str, Any]
