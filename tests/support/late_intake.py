"""A fake engine in a worker whose intake begins its first task only after another worker has begun it.

So it owns the task, but its lease has been lost by then, and with it the message.
"""

from __future__ import annotations

import time
from typing import Any

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker.generation.intake import Intake
from tests.support.fake_engine import FakeEngine


class LateIntakeEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        begin_all = Intake._begin_all

        def beginning(intake: Intake, batch: Any, *more: Any) -> Any:
            keys = [stream_keys(job.task_id).log for job in batch]
            while not all(connections.streams().exists(key) for key in keys):
                time.sleep(0.01)
            Intake._begin_all = begin_all  # type: ignore[method-assign]
            return begin_all(intake, batch, *more)

        Intake._begin_all = beginning  # type: ignore[method-assign]
