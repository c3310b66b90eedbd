"""What a delivery of a task is to do, decided from what earlier deliveries left in Redis.

Every delivery begins with `begin.lua`, which hands out the task's next fencing number. From then on the script
that publishes refuses older numbers, so a worker that was only cut off cannot write into the stream any more.

    nothing left            generate
    tokens in the log       resume after them
    finished                hand over what was recorded
    asked to cancel         end it with what there is
    too many deaths         end it as a failure, with what there is
    another model's tokens  end it as a failure: nobody else's model can go on (another adapter's: the engine does)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.worker.results import Written

Verdict = Literal["generate", "finished", "cancelled", "poisoned", "model_changed"]


@dataclass(frozen=True, slots=True)
class Begun:
    """The reply of `begin.lua` for one task. `attempt` is 0 when the task is done already. `adapter` is named by
    its content, and compared where its files are read: in the engine."""

    attempt: int
    deaths: int
    cancel: str
    model: str
    adapter: str
    record: dict[str, Any] | None
    written: Written

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> Begun:
        attempt, deaths, cancel, model, adapter, done, entries = reply
        return cls(
            attempt=int(attempt),
            deaths=int(deaths),
            cancel=cancel.decode(),
            model=model.decode(),
            adapter=adapter.decode(),
            record=json.loads(done) if done else None,
            written=Written.of([json.loads(entry) for entry in entries]),
        )

    def verdict(self, *, model: str, max_attempts: int) -> Verdict:
        if self.record is not None:
            return "finished"
        if self.cancel:
            return "cancelled"
        if self.deaths >= max_attempts:
            return "poisoned"
        if self.written.token_ids and self.model and self.model != model:
            return "model_changed"
        return "generate"
