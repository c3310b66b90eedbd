"""A fake engine in a worker that completes its first task only after another worker has completed it."""

from __future__ import annotations

import time

from petiole.gpu_worker.config import EngineConfig
from petiole.tasks.servers import connections
from petiole.tasks.worker.generation.job import Job
from tests.support.fake_engine import FakeEngine


class LateCompletionEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        complete = Job.complete

        def completing(job: Job) -> None:
            Job.complete = complete  # type: ignore[method-assign]
            while len(connections.streams().keys("petiole:{*}:log")) < 2:  # the task's, and that of its link
                time.sleep(0.01)
            complete(job)
            print("completed late", flush=True)

        Job.complete = completing  # type: ignore[method-assign]
