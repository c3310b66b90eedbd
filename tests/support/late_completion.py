"""A fake engine in a worker that completes its first task only after another worker has completed it."""

from __future__ import annotations

import time

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.servers import connections
from petiole.tasks.worker.completion.completion import Completion
from tests.support.fake_engine import FakeEngine


class LateCompletionEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        take = Completion.take

        def taking(completion: Completion) -> None:
            Completion.take = take  # type: ignore[method-assign]
            while len(connections.streams().keys("petiole:{*}:log")) < 2:  # the task's, and that of its link
                time.sleep(0.01)
            take(completion)
            print("completed late", flush=True)

        Completion.take = taking  # type: ignore[method-assign]
