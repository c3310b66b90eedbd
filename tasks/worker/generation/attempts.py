"""Decides what a delivery of a task does, from the state that earlier deliveries left in Redis.

Every delivery begins with `begin.lua`, which increments the task's fencing number, the attempt. `publish.lua`
refuses older attempts, so a worker that was disconnected but not dead can no longer write into the stream.

    no state                generate
    damaged keys            fail the task: nothing can be written to its stream
    tokens in the log       resume after them
    finished                return the recorded result
    cancel flag             end the task with the output so far
    a log that is damaged   fail the task: it cannot be resumed
    too many deaths         fail the task, with the output so far
    another model's tokens  fail the task: another model cannot resume them (the engine checks the adapter)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from petiole.tasks.errors import GenerationFailed
from petiole.tasks.worker.output.outcomes import Written, failed

Verdict = Literal["generate", "finished", "cancelled", "unreadable", "poisoned", "model_changed"]


@dataclass(frozen=True, slots=True)
class Begun:
    """The reply of `begin.lua` for one task. `attempt` is 0 if the task is done. `adapter` identifies one by its
    content; the engine compares it, because it reads the files."""

    attempt: int
    deaths: int
    cancel: bool
    model: str
    adapter: str
    record: dict[str, Any] | None
    written: Written

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> Begun | None:
        """None: the task's keys are damaged."""
        if not reply:
            return None
        attempt, deaths, cancel, model, adapter, done, entries = reply
        return cls(
            attempt=int(attempt),
            deaths=int(deaths),
            cancel=bool(cancel),
            model=model.decode(errors="replace"),
            adapter=adapter.decode(errors="replace"),
            record=None if attempt else _record(done),
            written=Written.of(entries),
        )

    def verdict(self, *, model: str, max_attempts: int) -> Verdict:
        if self.record is not None:
            return "finished"
        if self.cancel:
            return "cancelled"
        if self.written.unreadable:
            return "unreadable"
        if self.deaths >= max_attempts:
            return "poisoned"
        if self.written.token_ids and self.model and self.model != model:
            return "model_changed"
        return "generate"


def _record(done: bytes) -> dict[str, Any]:
    """How the task ended, in the form of `Outcome.record`."""
    try:
        record = json.loads(done)
        if isinstance(record["finish_reason"], str) and isinstance(record.get("error", {}), dict):
            return dict(record)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return failed(GenerationFailed("the record of its end in Redis cannot be read")).record
