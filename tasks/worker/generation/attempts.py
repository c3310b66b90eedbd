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
from typing import Any

from petiole.tasks.errors import GenerationFailed, ModelChanged, WorkersLost
from petiole.tasks.wire.record.attempts import BegunAttempt
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker.output.outcomes import Outcome, failed, recorded, unreadable


@dataclass(frozen=True, slots=True)
class BeginReply:
    """The reply of `begin.lua` for one task. `attempt` is 0 if the task is finished. `adapter` identifies the
    adapter by its content; the engine compares it, because the engine reads the files. `before`: the attempt
    before this one, if it is known; `died`: its worker has died."""

    attempt: int
    deaths: int
    cancel: bool
    model: str
    adapter: str
    record: dict[str, Any] | None
    written: LoggedOutput
    before: BegunAttempt | None = None
    died: bool = False

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> BeginReply | None:
        """Parse a reply. None: the task's keys are damaged."""
        if not reply:
            return None
        attempt, deaths, cancel, model, adapter, done, entries, before, died = reply
        return cls(
            attempt=int(attempt),
            deaths=int(deaths),
            cancel=bool(cancel),
            model=model.decode(errors="replace"),
            adapter=adapter.decode(errors="replace"),
            record=None if attempt else _record(done),
            written=LoggedOutput.of(entries),
            before=BegunAttempt.parse(int(attempt) - 1, before),
            died=bool(died),
        )

    def outcome(self, *, model: str, max_attempts: int) -> Outcome | None:
        """The outcome of a task that is not generated; None if it is generated. `cancel` ends the task in either
        case."""
        written = self.written
        if self.record is not None:
            return recorded(self.record, written)
        if written.unreadable:
            return unreadable(written)
        if self.deaths >= max_attempts:
            return failed(WorkersLost(self.deaths, written.text))
        if written.deltas and self.model and self.model != model:
            so_far = f"{len(written.token_ids)} tokens or texts are the work of model {self.model}"
            return failed(ModelChanged(f"{so_far}; this worker serves model {model}"))
        return None


def _record(done: bytes) -> dict[str, Any]:
    """How the task ended, in the form of `Outcome.record`."""
    try:
        record = json.loads(done)
        if isinstance(record["finish_reason"], str) and isinstance(record.get("error", {}), dict):
            return dict(record)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return failed(GenerationFailed("the record of its end in Redis cannot be read")).record
