"""A fake engine in a worker without garbage collection, whose figures count the jobs that are in memory."""

from __future__ import annotations

import gc

from gpu_worker.config import EngineConfig
from support.fake_engine import FakeEngine
from tasks.worker.job import Job


class UncollectedEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        gc.disable()

    def stats(self) -> dict[str, float | int | str]:
        return {**super().stats(), "jobs_in_memory": sum(type(one) is Job for one in gc.get_objects())}
