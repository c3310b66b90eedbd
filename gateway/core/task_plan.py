"""What a request becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import structs

from petiole.gateway.core.record import RequestRecord

TaskName = Literal["generate", "chat", "embed", "rerank", "score", "classify"]


@dataclass(frozen=True)
class TaskCall:
    """A task to submit: `petiole.chat.delay(**options)`."""

    task: TaskName
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A record, and one call for each of its tasks. `submission`: options of Celery's and Petiole's for all of
    them. `names`: by an option of a task, the field of the request that it comes from; errors name the latter.
    `keep_s`: how long the record is kept; None: as the setting says."""

    record: RequestRecord
    calls: Sequence[TaskCall]
    submission: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    keep_s: int | None = None

    def noting(self, **more: Any) -> Plan:
        """The same, with more in its record."""
        return replace(self, record=structs.replace(self.record, asked={**self.record.asked, **more}))
