"""A fake engine in a worker without garbage collection, whose figures count the jobs that are in memory."""

from __future__ import annotations

import gc

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.worker.generation.driver import JobDriver
from tests.support.fake_engine import FakeEngine


class UncollectedEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        gc.disable()

    def stats(self) -> dict[str, float | int | str]:
        return {**super().stats(), "jobs_in_memory": sum(type(one) is JobDriver for one in gc.get_objects())}
